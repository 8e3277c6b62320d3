"""The fuzzers' short form: the corpus again, then a few hundred inputs per boundary; and what the
harness itself promises.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import values
from tests.fuzz.__main__ import main
from tests.fuzz.boundary import CORPUS, Boundary, keep, loaded
from tests.fuzz.guard import MemoryLimitError, TimeLimitError, limited
from tests.fuzz.runner import all_boundaries, drawn, error_of, run, shrunk

SEED = 14
BOUNDARIES = {boundary.name: boundary for boundary in all_boundaries()}
KEPT = [(name, file) for name, boundary in BOUNDARIES.items() for file in boundary.kept()]


@pytest.mark.parametrize(("name", "file"), KEPT)
def test_what_was_found_once_is_handled(name: str, file: str) -> None:
    boundary = BOUNDARIES[name]
    with limited(boundary.cpu_seconds, boundary.megabytes):
        boundary.check(boundary.kept()[file])


@pytest.mark.parametrize("name", sorted(BOUNDARIES))
def test_every_input_is_taken_or_refused(name: str) -> None:
    boundary = BOUNDARIES[name]
    outcome = run(boundary, SEED, inputs=boundary.short_inputs)
    assert outcome.finding is None, str(outcome.finding)
    assert boundary.outcomes <= set(outcome.counts), "the fuzzer does not get past the first check"


def test_every_corpus_directory_belongs_to_a_boundary() -> None:
    assert {path.name for path in CORPUS.iterdir() if path.is_dir()} <= set(BOUNDARIES)


# -- the harness ---------------------------------------------------------------------------------


def boundary_of(check, **limits) -> Boundary:
    return Boundary("made_up", lambda random: [random.randrange(9)] * 4, check, **limits)


def test_an_input_that_takes_too_long_is_a_finding() -> None:
    def endless(_value: object) -> str:
        while True:
            pass

    outcome = run(boundary_of(endless, cpu_seconds=0.1), 1, inputs=1)
    assert isinstance(outcome.finding.error, TimeLimitError)


def test_catching_everything_does_not_hide_the_time_limit() -> None:
    def stubborn(_value: object) -> str:
        while True:
            with contextlib.suppress(Exception):
                sum(range(1000))

    outcome = run(boundary_of(stubborn, cpu_seconds=0.1), 1, inputs=1)
    assert isinstance(outcome.finding.error, TimeLimitError)


def test_an_input_that_takes_too_much_memory_is_a_finding() -> None:
    def greedy(_value: object) -> str:
        return str(len(b"x" * 100_000_000))

    outcome = run(boundary_of(greedy, megabytes=50), 1, inputs=1)
    assert isinstance(outcome.finding.error, MemoryLimitError)
    assert run(boundary_of(greedy, megabytes=500), 1, inputs=1).finding is None


def test_memory_that_was_freed_before_counts_when_an_input_takes_it_again() -> None:
    """The freed blocks lie below one that stays, so the allocator keeps them."""

    def greedy(_value: object) -> str:
        return str(len(bytearray(b"x") * 60_000_000))

    blocks = [bytearray(b"x") * 100_000 for _ in range(3_000)]
    last = blocks.pop()
    del blocks
    outcome = run(boundary_of(greedy, megabytes=50), 1, inputs=1)
    assert isinstance(outcome.finding.error, MemoryLimitError)
    assert last


def test_the_peak_of_one_input_is_not_charged_to_the_next() -> None:
    sizes = iter((100_000_000, 1_000))

    def once(_value: object) -> str:
        return str(len(b"x" * next(sizes)))

    boundary = boundary_of(once, megabytes=50)
    assert isinstance(
        error_of(boundary, [1], run(boundary_of(str), 1, inputs=1).counts), MemoryLimitError
    )
    assert error_of(boundary, [1], run(boundary_of(str), 1, inputs=1).counts) is None


def test_a_finding_is_the_same_again_and_shrinks() -> None:
    def picky(value: list[int]) -> str:
        assert 3 not in value
        return "fine"

    outcome = run(boundary_of(picky), 5, inputs=500)
    assert outcome.finding is not None
    assert drawn(outcome.finding.boundary, 5, outcome.finding.index) == outcome.finding.value
    assert outcome.inputs == outcome.finding.index
    assert shrunk(outcome.finding).value == [3]


def test_the_corpus_gives_back_what_it_was_given(tmp_path: Path) -> None:
    for value in (b"\x00\xff", {"a": [1, None, {"b": b"\x80"}], "c": "\ud800\n"}, "text"):
        assert loaded(keep(tmp_path, "one", value)) == value


def test_mutations_come_from_the_seed_alone() -> None:
    once = [values.mutated(Random(n), b"0123456789") for n in range(50)]
    assert once == [values.mutated(Random(n), b"0123456789") for n in range(50)]
    assert len(set(once)) > 40


def test_a_boundary_runs_in_a_process_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "lock_row", "--inputs", "20", "--seed", "3"]) == 0
    said = capfd.readouterr().out
    assert "seed 3" in said
    assert "lock_row: 20 inputs (" in said
