"""The record says which names the positions of an application have in the table of its sink."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kcl_pipeline.errors import OtherApplicationError
from kcl_pipeline.leases.application.identity import (
    application_from_text,
    application_text,
    successor,
)
from kcl_pipeline.leases.identity_check import as_json, ensure_application
from tests.leases.test_application import (
    AS_RECORDED,
    IN_TABLE,
    LEADER,
    SINGLE,
    no_shards,
    started_fixture,  # noqa: F401 (a fixture)
)
from tests.support.lease_tables import aws_fixture, client_fixture, tables_fixture  # noqa: F401

SHORT = replace(IN_TABLE, short_names=True)


def ensured(tables, wanted, *, short=True):
    found = ensure_application(
        "app", tables.coordinator, tables.leases, wanted, no_shards, lambda: short
    )
    assert tables.coordinator.read_application().identity == found.identity
    return found.identity


def not_asked():
    raise AssertionError("the record decides")


def as_long_names_only(text: str) -> str:
    """Return the sink that a version reads which knows only long names.

    It compares this text with the address of its settings.
    """
    return str(json.loads(text)["sink"].removeprefix("positions:"))


def test_older_versions_see_another_sink():
    assert as_long_names_only(application_text(IN_TABLE)) == "delta:/lake/rows"
    assert as_long_names_only(application_text(SHORT)) == "positions-2:delta:/lake/rows"
    seen = replace(SINGLE, sink=as_long_names_only(application_text(SHORT)))
    with pytest.raises(OtherApplicationError, match="writes to positions-2:delta:/lake/rows"):
        successor("app", seen, AS_RECORDED)


@pytest.mark.parametrize("identity", [SHORT, IN_TABLE, SINGLE, LEADER])
def test_the_record_is_read_as_it_was_written(identity):
    assert application_from_text(application_text(identity)).identity == identity


@pytest.mark.parametrize("wanted", [AS_RECORDED, IN_TABLE])
@pytest.mark.parametrize("short", [True, False])
def test_the_first_start_asks_the_table(started, wanted, short):
    """Also if the record was lost: then the table may have long names."""
    assert ensured(started, wanted, short=short) == replace(IN_TABLE, short_names=short)


@pytest.mark.parametrize("short", [True, False])
def test_a_worker_after_a_leader_asks_the_table(started, short):
    assert ensured(started, LEADER) == LEADER
    assert ensured(started, AS_RECORDED, short=short) == replace(IN_TABLE, short_names=short)


@pytest.mark.parametrize("short", [True, False])
def test_a_change_from_two_phase_asks_the_table(started, short):
    assert ensured(started, SINGLE) == SINGLE
    assert ensured(started, AS_RECORDED) == SINGLE
    assert ensured(started, IN_TABLE, short=short) == replace(IN_TABLE, short_names=short)


@pytest.mark.parametrize("recorded", [SHORT, IN_TABLE])
def test_recorded_names_stay(started, recorded):
    assert ensured(started, AS_RECORDED, short=recorded.short_names) == recorded
    for wanted in (AS_RECORDED, IN_TABLE, LEADER):
        found = ensure_application(
            "app", started.coordinator, started.leases, wanted, no_shards, not_asked
        )
        assert found.identity == recorded
    with pytest.raises(OtherApplicationError, match="kcl-pipeline downgrade"):
        ensured(started, SINGLE)


@pytest.mark.parametrize(
    ("identity", "names"), [(SHORT, "short"), (IN_TABLE, "long"), (SINGLE, None), (LEADER, None)]
)
def test_the_names_are_shown(identity, names):
    shown = as_json(application_from_text(application_text(identity)))
    assert shown is not None
    assert shown["position_names"] == names
