"""`make simulate`: which seeds it takes, and what it says of those that fail."""

import io
import json
import os
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from verification import simulate as command
from verification.simulation import StormOptions, simulate
from verification.simulation import shrink as shrinking
from verification.simulation.seeds import commit_seeds, random_seeds, shown

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def seed_four():
    return simulate(4)


@pytest.fixture
def failing(monkeypatch, seed_four):
    """Makes the seeds that it is called with fail, at once and however mild the storm."""
    chosen = set()

    def fake(seed, options=None):
        broken = ("S4: an event is in the table twice",) if seed in chosen else ()
        return replace(seed_four, seed=seed, violations=broken, incidents=2)

    monkeypatch.setattr(command, "simulate", fake)
    monkeypatch.setattr(shrinking, "simulate", fake)
    monkeypatch.setattr(
        command, "ProcessPoolExecutor", lambda workers, **_: ThreadPoolExecutor(workers)
    )
    return chosen.update


@pytest.fixture(scope="module")
def in_this_process():
    """What `--json` prints at the end of two seeds in one process."""
    with redirect_stdout(io.StringIO()) as out:
        assert command.main(["--seeds", "4:6", "--workers", "1", "--json"]) == 0
    return json.loads(out.getvalue().splitlines()[-1])


def test_it_ends_with_one_line_of_json(in_this_process):
    answer = in_this_process
    assert answer.keys() == {
        "seeds",
        "violations",
        "failing_seeds",
        "faults",
        "empty_cells",
        "seeds_per_s",
    }
    assert (answer["seeds"], answer["violations"], answer["failing_seeds"]) == (2, 0, [])
    assert answer["empty_cells"] > 0


def test_two_processes_give_the_same_figures_as_one(in_this_process, capsys):
    assert command.main(["--seeds", "4:6", "--workers", "2", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer | {"seeds_per_s": 0} == in_this_process | {"seeds_per_s": 0}


def test_the_first_failing_seed_ends_a_run_that_looks_for_it(monkeypatch, capsys):
    monkeypatch.setattr(
        command,
        "simulate",
        lambda seed, _options=None: simulate(seed, StormOptions(settle_seconds=0.0)),
    )
    assert command.main(["--seeds", "3", "--first"]) == 1
    assert "seed 3 fails: 0 s after the storm" in capsys.readouterr().out


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_last_lines_name_every_failing_seed(failing, capsys, workers):
    failing(range(3, 10))
    assert command.main(["--seeds", "0:40", "--workers", workers]) == 1
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[-1] == "7 seeds broke an invariant: [3, 4, 5, 6, 7, 8, 9]"
    assert lines[-8:-1] == [
        f"seed {seed} fails: S4: an event is in the table twice" for seed in range(3, 10)
    ]
    assert text.count("shrunk: simulate(") == command.SHRUNK_FAILURES
    assert "replay: make simulate SEEDS=3\n" in text


class Output(io.StringIO):
    """Notes when the failure of a seed has been printed."""

    def __init__(self):
        super().__init__()
        self.has_failure = threading.Event()

    def write(self, text):
        if "seed 7 fails: " in text:
            self.has_failure.set()
        return super().write(text)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_failing_seed_is_printed_before_later_seeds_run(failing, monkeypatch, workers):
    failing([7])
    out = Output()
    monkeypatch.setattr(sys, "stdout", out)
    run_one = command.run_one

    def run(seed):
        if seed == 20:
            assert out.has_failure.wait(20)
        return run_one(seed)

    monkeypatch.setattr(command, "run_one", run)
    assert command.main(["--seeds", "0:40", "--workers", workers]) == 1
    assert "shrunk: simulate(7, " in out.getvalue()


def test_an_interrupted_run_names_what_failed_until_then(failing, monkeypatch, capsys):
    failing([3])
    run_one = command.run_one

    def run(seed):
        if seed == 10:
            raise KeyboardInterrupt
        return run_one(seed)

    monkeypatch.setattr(command, "run_one", run)
    assert command.main(["--seeds", "0:40", "--workers", "1"]) == 130
    text = capsys.readouterr().out
    assert "interrupted after 10 of 40 seeds" in text
    assert text.splitlines()[-1] == "1 seeds broke an invariant: [3]"


def test_an_error_of_the_simulation_itself_counts_as_a_failing_seed(monkeypatch, capsys):
    def broken(seed, _options=None):
        raise RuntimeError(f"no such task in seed {seed}")

    monkeypatch.setattr(command, "simulate", broken)
    monkeypatch.setattr(shrinking, "simulate", broken)
    assert command.main(["--seeds", "5", "--workers", "1"]) == 1
    text = capsys.readouterr().out
    assert "seed 5 fails: the simulation itself failed: RuntimeError: no such task" in text
    assert "not shrunk: RuntimeError" in text


def test_a_process_that_dies_costs_its_seeds_and_not_the_report():
    code = (
        "import os, sys; from verification import simulate as c; from verification.simulation "
        "import results\n"
        "def died(seed): os._exit(9)\n"
        "c.run_one = died; sys.exit(c.main(['--seeds', '0:9', '--workers', '2']))"
    )
    # A function of __main__ is looked up by name in the pool's processes, and is not found there
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "a process died while this seed ran" in done.stdout
    assert re.search(r"4 seeds broke an invariant: \[0, 1, 2, 3\]", done.stdout)


@pytest.mark.parametrize("wrong", ["5:5", "7:3", "x", "1:y", "-1:3"])
def test_a_range_without_seeds_is_refused(wrong, capsys):
    with pytest.raises(SystemExit):
        command.main([f"--seeds={wrong}"])
    assert "write for example 0:2000" in capsys.readouterr().err


def test_with_a_count_it_begins_at_a_random_seed_and_prints_it(failing, capsys):
    printed = set()
    for _ in range(3):
        assert command.main(["--count", "7", "--workers", "1"]) == 0
        (found,) = re.findall(r"random seeds, SEEDS=(\d+):(\d+)", capsys.readouterr().out)
        assert int(found[1]) - int(found[0]) == 7
        printed.add(found)
    assert len(printed) > 1
    assert random_seeds(5).start >= 50_000_000


def git(root, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.com"]
    subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)


def test_the_seeds_of_a_commit_follow_from_its_id(tmp_path):
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "one")
    seeds, source = commit_seeds(root=tmp_path)
    assert (len(seeds), commit_seeds(root=tmp_path)) == (300, (seeds, source))
    assert source.startswith("commit ")
    git(tmp_path, "commit", "--allow-empty", "-m", "two")
    assert commit_seeds(root=tmp_path)[0] != seeds


def test_without_a_commit_the_seeds_follow_from_the_sources(tmp_path):
    module = tmp_path / "kcl_pipeline" / "module.py"
    module.parent.mkdir()
    module.write_text("one = 1\n")
    seeds, source = commit_seeds(root=tmp_path)
    assert (len(seeds), commit_seeds(root=tmp_path)) == (300, (seeds, source))
    assert source.endswith("(no commit)")
    module.write_text("one = 2\n")
    assert commit_seeds(root=tmp_path)[0] != seeds


def test_ci_takes_the_seeds_of_the_commit_and_prints_them(failing, capsys):
    assert command.main(["--ci", "--workers", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["seeds"] == 300
    seeds, source = commit_seeds()
    assert f"300 seeds that follow from {source}, SEEDS={shown(seeds)}" in captured.err


def test_without_arguments_it_takes_the_fixed_seeds(failing, capsys):
    failing([1_999])
    assert command.main(["--workers", "1"]) == 1
    text = capsys.readouterr().out
    assert text.startswith("2000 fixed seeds, SEEDS=0:2000")
    assert text.splitlines()[-1] == "1 seeds broke an invariant: [1999]"


@pytest.mark.parametrize(
    ("variables", "arguments"),
    [
        ((), ""),
        (("SEEDS=5:9",), "--seeds 5:9"),
        (("COUNT=50",), "--count 50"),
    ],
)
def test_make_passes_seeds_and_count(variables, arguments):
    done = subprocess.run(
        ["make", "--dry-run", "simulate", *variables],
        cwd=ROOT,
        env={**os.environ, "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [one for one in done.stdout.splitlines() if "-m verification.simulate" in one]
    assert " ".join(line.split("verification.simulate")[1].split()) == arguments
