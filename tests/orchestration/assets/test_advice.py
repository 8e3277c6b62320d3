"""A check that fails says what to do; one that passes does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcl_pipeline.leases.lease.values import BadRow
from kcl_pipeline.leases.state.worker_status import PausedLease, WorkerStatus
from kcl_pipeline.orchestration.assets.checks import health
from tests.support.dagster_fakes import leases, worker

PAUSED = WorkerStatus(paused=(PausedLease("s-0", "it fails", 3.0),), paused_leases=1)


@pytest.mark.parametrize(
    ("failing", "passing", "advice"),
    [
        (
            health.coverage(leases(4, ["a"])[1:], ["orders"]),
            health.coverage(leases(4, ["a"]), ["orders"]),
            health.COVERAGE_ADVICE,
        ),
        (health.stuck({"s-0": 90.0}, 10.0), health.stuck({}, 10.0), health.STUCK_ADVICE),
        (
            health.rows([BadRow("leases", "s-0", "no checkpoint")]),
            health.rows([]),
            health.ROWS_ADVICE,
        ),
        (
            health.balance(leases(4, ["a"]), [worker("a"), worker("b")], 10),
            health.balance(leases(4, ["a", "b"]), [worker("a"), worker("b")], 10),
            health.BALANCE_ADVICE,
        ),
        (health.lag(90_000, 60.0), health.lag(10, 60.0), health.LAG_ADVICE),
        (
            health.paused([replace(worker("a"), status=PAUSED)]),
            health.paused([worker("a")]),
            health.PAUSED_ADVICE,
        ),
    ],
    ids=lambda value: getattr(value, "check", ""),
)
def test_a_failing_check_says_what_to_do(failing, passing, advice):
    assert not failing.passed
    assert failing.description.endswith(f". {advice}")
    assert passing.passed
    assert advice not in passing.description
