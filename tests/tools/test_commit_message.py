"""The commit hook accepts the project's messages and names what is wrong with others."""

from __future__ import annotations

import pytest

from tools.commit_message import main, problems


@pytest.mark.parametrize(
    "message",
    [
        "leases: renew in parallel\n\nOne slow call delayed all others.\n# a comment\n",
        "delta, spark: use the glossary's words\n\nBecause.\n",
        "Merge branch 'main'\n",
    ],
)
def test_messages_of_the_project_are_accepted(message: str) -> None:
    assert problems(message) == []


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("Fix it\n\nWhy.\n", "the subject is not `package: imperative`: 'Fix it'"),
        (f"leases: {'x' * 65}\n\nWhy.\n", "the subject has 73 characters, not at most 72"),
        ("leases: renew\nWhy.\nMore.\n", "the second line is not empty"),
        ("leases: renew\n", "there is no body that says why"),
    ],
)
def test_what_is_wrong_is_named(message: str, problem: str) -> None:
    assert problems(message) == [problem]


def test_the_hook_exits_with_one(tmp_path, capsys) -> None:
    path = tmp_path / "message"
    path.write_text("Fix it\n")
    assert main([str(path)]) == 1
    assert "not `package: imperative`" in capsys.readouterr().out
