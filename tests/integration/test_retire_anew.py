"""Retire an application, and start one of the same name (embedded AWS): count the rows."""

from __future__ import annotations

import threading

import pytest
from deltalake import DeltaTable

from kcl_pipeline.aws import open_removals, open_tables
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.control.application import ApplicationControl
from kcl_pipeline.control.retire import Retiring
from kcl_pipeline.errors import ApplicationInUseError
from tests.support.iam_world import (  # noqa: F401 (fixtures)
    Application,
    _open_again,
    application_fixture,
    aws_fixture,
    gate_fixture,
)


def retiring(application: Application) -> Retiring:
    settings, clients, clock = application.pipeline.settings, application.clients, SystemClock()
    tables = open_tables(settings, clients, clock)
    app = ApplicationControl(
        settings, tables.lease, tables.workers, tables.coordinator, clock, "ann"
    )
    removals = open_removals(settings, clients, clock)
    return Retiring(app, removals, application.pipeline.sink, settings.streams)


def count(application: Application) -> int:
    # The folder exists before the first version of the table does.
    if not DeltaTable.is_deltatable(str(application.table)):
        return 0
    return int(DeltaTable(str(application.table)).to_pyarrow_table().num_rows)


def test_a_new_application_continues_after_the_positions_in_the_table(
    application: Application,
) -> None:
    assert application.drain() == 20
    done = retiring(application).retire(application.name)
    assert done.is_complete, done
    assert any("continues after them" in text for text in done.plan.stays)
    application.publish(5)
    assert application.drain() == 5, "nothing is repeated, and nothing is skipped"
    assert count(application) == 25


def test_a_running_worker_is_named(application: Application) -> None:
    stop = SystemClock().signal()
    worker = application.pipeline.build_worker("w1", clients=application.clients)
    thread = threading.Thread(target=lambda: worker.run(stop))
    thread.start()
    try:
        deadline = SystemClock().monotonic() + 60
        while count(application) < 20:
            assert SystemClock().monotonic() < deadline
            SystemClock().sleep(0.2)
        # What is observed first depends on the threads of the worker: its report, a renewal of its
        # leases, or a heartbeat of its lock.
        with pytest.raises(ApplicationInUseError, match=r"the (worker|leader) w1 (has re|renews)"):
            retiring(application).retire(application.name)
    finally:
        stop.set()
        thread.join(30)
    assert retiring(application).retire(application.name).is_complete
