"""The protocol's state space: no rule breaks within the bounds, and each guard that is taken away
breaks one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.shortened import shortened
from verification.model.commits import Commits, State
from verification.model.scenarios import FULL, GUARDS, SMALL, Model, without
from verification.model.search import main, search

SHORT = {
    "Java begins the child",
    "a seek",
    "combined commits",
    "leases: a child that is created at the end",
    "leases: parent and child",
    "leases: the deleted row of a parent",
    "leases: two workers",
    "two children of a parent",
    "two workers",
}
"""One of each group of rules. Nothing outside of `verification/model` can change what a search
finds; after a change there `make test-long` or `make microscope` searches the others.
"""


@pytest.mark.parametrize("model", shortened(SMALL, lambda m: m.name in SHORT), ids=lambda m: m.name)
def test_no_rule_breaks(model: Model) -> None:
    found = search(model)
    print(f"{model.name}: {found.states} states, {found.complete} complete")
    assert (found.broken, found.path) == ("", ())
    assert found.states > 2_000
    assert found.complete > 100, "the protocol also gets somewhere"


def test_a_protocol_that_stands_still_is_found() -> None:
    """Nothing can be assigned, so that no record is ever committed."""

    class Idle(Commits):
        def of(self, s: State) -> Iterator[tuple[str, State]]:
            return (step for step in super().of(s) if not step[0].startswith("assign"))

    found = search(Idle("nobody", goes_on=True))
    assert (found.broken, found.complete) == ("it cannot go on", 0)


LONG = {
    "ancestors after a refusal",
    "ancestors in an end",
    "begun shards in the wait",
    "checkpoint of a write",
    "child in the restoration",
    "counter of a seek",
    "entry after a seek",
    "listing after the table",
    "mark behind the checkpoint",
    "mark in a seek",
    "parent in the creation",
    "positions in the sync",
    "renewal before a stop",
    "rows before the table",
    "rows of descendants in a seek",
    "second write of a seek",
}
"""Searches of four thousand to a hundred thousand states; `make microscope` runs them, too."""


@pytest.mark.parametrize(
    "guard",
    [pytest.param(guard, marks=[pytest.mark.long] if guard in LONG else []) for guard, _ in GUARDS],
)
def test_each_guard_is_needed(guard: str) -> None:
    found = search(without(guard), limit=500_000)
    print(f"{guard}: {found.broken}: {'; '.join(found.path)}")
    assert found.broken
    assert found.path


def test_the_configuration_of_every_guard_is_searched_with_it() -> None:
    """A variant shows nothing if its configuration breaks with the rule, too."""
    searched = {*SMALL, *FULL}
    assert {model for _, model in GUARDS} <= searched
    assert not any(model.without for model in searched)


def test_too_many_states_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="more than 100 states"):
        search(SMALL[0], limit=100)


def test_the_command_says_what_it_visited(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parents = next(one for one in SMALL if one.name == "leases: parent and child")
    monkeypatch.setattr("verification.model.search.SMALL", (parents,))
    check = next(one for one in GUARDS if one[0] == "parent check")
    monkeypatch.setattr("verification.model.search.GUARDS", (check,))
    assert main(["--small"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert "no rule broken" in out[0]
    assert "without the parent check: a child began before its parent had ended" in out[1]
