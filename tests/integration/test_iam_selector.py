"""A `StreamSelector` against the embedded AWS, with the documented permissions alone."""

from __future__ import annotations

import itertools

import pytest

from kcl_pipeline import AccessDeniedError, SettingsError, StreamSelector
from kcl_pipeline.cli.doctor.setup import selection_findings
from kcl_pipeline.pipeline.arguments import select_function
from kcl_pipeline.status.findings import Finding, FindingLevel
from kcl_pipeline.testing.clock import VirtualClock
from tests.support.iam_world import (  # noqa: F401 (fixtures)
    Application,
    Gate,
    _open_again,
    application_fixture,
    aws_fixture,
    gate_fixture,
    permissions,
)

LISTING, TAGS = sorted(permissions("selector"))
PREFIXES = (f"selected-{number}-" for number in itertools.count())


def finder(application: Application, prefix: str) -> tuple[VirtualClock, StreamSelector]:
    for name in ("a", "b", "c"):
        application.kinesis.create_stream(StreamName=prefix + name, ShardCount=1)
    for name in ("a", "c"):
        application.kinesis.add_tags_to_stream(
            StreamName=prefix + name, Tags={"team": "x", "stage": name}
        )
    return VirtualClock(), StreamSelector(prefix, {"team": "x"})


def test_a_selector_finds_streams_by_prefix_and_tags(gate: Gate, application: Application) -> None:
    prefix = next(PREFIXES)
    clock, selector = finder(application, prefix)
    gate.used.clear()
    gate.allowed = permissions("selector")
    find = select_function(selector, application.clients, clock)
    assert find is not None
    assert tuple(find()) == (f"{prefix}a", f"{prefix}c")
    assert gate.used == gate.allowed
    gate.used.clear()
    assert tuple(find()) == (f"{prefix}a", f"{prefix}c")
    assert gate.used == {LISTING}, "tags are kept for some minutes"
    plain = select_function(StreamSelector(prefix), application.clients, clock)
    assert plain is not None
    assert len(tuple(plain())) == 3


@pytest.mark.parametrize("lacking", [LISTING, TAGS])
def test_a_missing_permission_is_named(
    gate: Gate, application: Application, lacking: tuple[str, str]
) -> None:
    clock, selector = finder(application, next(PREFIXES))
    gate.allowed = permissions("selector") - {lacking}
    find = select_function(selector, application.clients, clock)
    assert find is not None
    with pytest.raises(AccessDeniedError) as failure:
        find()
    assert lacking[0].partition(":")[2] in str(failure.value)
    found: list[Finding] = list(selection_findings(find))
    assert [one.level for one in found] == [FindingLevel.PROBLEM]
    assert f"allow {lacking[0]} in the IAM policy" in str(found[0])


def test_wrong_selectors_are_refused() -> None:
    with pytest.raises(SettingsError, match="neither prefix nor tags"):
        StreamSelector()
    with pytest.raises(SettingsError, match="is not a prefix"):
        StreamSelector("a b")
    with pytest.raises(SettingsError, match="is not a dictionary"):
        StreamSelector(tags=["x"])  # type: ignore[arg-type]
