"""`make audit` fails for one package more and for one package less."""

from __future__ import annotations

import pytest

from tools import audit


def test_that_equal_sets_have_no_difference() -> None:
    assert audit.differences({"rich": "15.0.0"}, {"rich": "15.0.0", "setuptools": "80"}) == []


@pytest.mark.parametrize(
    ("pins", "present", "line"),
    [
        (
            {"rich": "15.0.0"},
            {},
            "rich: constraints.txt has 15.0.0, installed is no version",
        ),
        (
            {},
            {"rich": "15.0.0"},
            "rich: constraints.txt has no version, installed is 15.0.0",
        ),
        (
            {"rich": "15.0.0"},
            {"rich": "15.0.1"},
            "rich: constraints.txt has 15.0.0, installed is 15.0.1",
        ),
    ],
)
def test_that_each_difference_is_named(
    pins: dict[str, str], present: dict[str, str], line: str
) -> None:
    assert audit.differences(pins, present) == [line]


def test_that_markers_and_spellings_are_read() -> None:
    text = (
        '# comment\nMsg_Pack==1.0\nold==2.0; python_version < "3"\nnew==3.0; os_name == "posix"\n'
    )
    assert audit.pinned(text) == {"msg-pack": "1.0", "new": "3.0"}


def test_that_every_constraint_is_an_exact_version() -> None:
    text = audit.CONSTRAINTS.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if "==" not in line] == []
