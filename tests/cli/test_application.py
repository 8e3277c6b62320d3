"""`kcl-pipeline do accept`: shows what is recorded, and changes it on purpose (embedded AWS)."""

from __future__ import annotations

import pytest

from kcl_pipeline.leader.accept import ApplicationChange
from kcl_pipeline.leases.application import ApplicationIdentity
from kcl_pipeline.leases.identity_check import ensure_application
from kcl_pipeline.testing.tables import create_lease
from tests.support.cli_fleet import run, run_json

pytest_plugins = ["tests.support.cli_fixtures"]
pytestmark = pytest.mark.usefixtures("environment")


def record(fleet):
    found = fleet.tables.coordinator.read_application()
    return None if found is None else found.identity


@pytest.fixture
def recorded(fleet):
    """The application as its first worker leaves it, stopped: no owners, no lock, no rows."""
    stream = fleet.kinesis.resolve_stream(fleet.name, multi_stream=False)
    for lease in fleet.tables.lease.list_leases().leases:
        fleet.tables.lease.delete(lease)
        if lease.owner is None:
            create_lease(fleet.tables.lease, lease)
    identity = ApplicationIdentity.of([stream], is_multi_stream=False, sink="delta:/lake/rows")
    ensure_application(
        fleet.name, fleet.tables.coordinator, fleet.tables.lease, identity, lambda: ()
    )
    fleet.tables.coordinator.release_lock(fleet.tables.coordinator.read_lock())
    for row in fleet.tables.workers.scan_workers().workers:
        fleet.tables.workers.deregister(row.worker_id)
    fleet.clients.kinesis.create_stream(StreamName=f"{fleet.name}-other", ShardCount=2)
    return fleet


def test_shows_what_is_recorded_and_whether_the_settings_fit(recorded):
    name = recorded.name
    shown = run_json("do", "accept", "-a", name)
    assert shown["recorded"]["streams"][0]["arn"].endswith(f"stream/{name}")
    assert (shown["recorded"]["mode"], shown["problem"]) == ("single_stream", None)
    text = run("do", "accept", "-a", name, "-s", name).output
    assert "single stream" in text
    assert "delta:/lake/rows" in text
    other = run("do", "accept", "-a", name, "-s", f"{name}-other", code=1).output
    assert "the two streams have the same lease keys" in other


def test_shows_that_nothing_is_recorded_yet(fleet):
    assert "no streams are recorded" in run("do", "accept", "-a", fleet.name).output


def test_another_stream_is_accepted_with_all_leases_deleted(recorded):
    name = recorded.name
    told = run("do", "accept", "-a", name, "-s", f"{name}-other", "--streams")
    assert "1 lease deleted" in told.stdout
    (stream,) = record(recorded).streams
    assert stream.name == f"{name}-other"
    assert record(recorded).sink == "delta:/lake/rows"
    assert not record(recorded).changing
    assert recorded.tables.lease.list_leases().leases == ()
    assert recorded.tables.coordinator.read_lock() is None
    again = run("do", "accept", "-a", name, "-s", f"{name}-other", "--streams")
    assert "no change" in again.stdout


def test_a_change_that_was_cut_off_is_finished_by_the_next_one(recorded, monkeypatch):
    name = recorded.name
    delete = ApplicationChange._delete_leases
    monkeypatch.setattr(ApplicationChange, "_delete_leases", lambda _self: 1 // 0)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run("do", "accept", "-a", name, "-s", f"{name}-other", "--streams")
    assert record(recorded).changing
    assert "not finished" in run("do", "accept", "-a", name, "-s", name, code=1).output
    monkeypatch.setattr(ApplicationChange, "_delete_leases", delete)
    told = run("do", "accept", "-a", name, "-s", f"{name}-other", "--streams")
    assert "1 lease deleted" in told.stdout
    assert not record(recorded).changing


def test_workers_must_be_stopped(fleet):
    told = run("do", "accept", "-a", fleet.name, "-s", fleet.name, "--streams", code=1)
    assert "belongs to blue-" in told.stderr
    assert "stop all workers" in told.stderr
    assert record(fleet) is None


def test_a_sink_needs_the_pipeline(recorded):
    told = run("do", "accept", "-a", recorded.name, "-s", recorded.name, "--sink", code=1)
    assert "name the pipeline" in told.stderr


def test_another_sink_is_accepted_with_its_leases(recorded, tmp_path, monkeypatch):
    name = recorded.name
    (tmp_path / "elsewhere.py").write_text(
        "from kcl_pipeline import DeltaSink, KinesisPipeline\n"
        f"pipeline = KinesisPipeline({name!r}, [{name!r}], DeltaSink('/lake/elsewhere'))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = recorded.tables.lease.list_leases().leases
    refused = run("do", "accept", "-p", "elsewhere:pipeline", code=1).output
    assert "writes to delta:/lake/rows" in refused
    run("do", "accept", "-p", "elsewhere:pipeline", "--sink")
    assert record(recorded).sink == "delta:/lake/elsewhere"
    assert recorded.tables.lease.list_leases().leases == before


@pytest.mark.parametrize("stream", ["", "-other"])
def test_doctor_compares_the_streams(recorded, stream):
    """Other findings make the exit code 1: nobody works."""
    found = run_json(
        *("doctor", "-a", recorded.name, "-s", recorded.name + stream, "--watch-seconds", "0"),
        code=1,
    )
    (about,) = (one for one in found if one["name"] == "application")
    assert about["level"] == ("problem" if stream else "ok")
    expected = (
        "the two streams have the same lease keys"
        if stream
        else f"reads {recorded.name}, writes to delta:"
    )
    assert expected in about["sentence"]
