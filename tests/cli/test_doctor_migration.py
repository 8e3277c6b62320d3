"""What `doctor` says about the move to the single table: the status, what comes next, and when."""

from __future__ import annotations

import pytest

from kcl_pipeline.cli.doctor.migration import check_layout
from kcl_pipeline.leases.layout.migration_row import MigrationStatus, TableMigration
from kcl_pipeline.leases.layout.placement import Placement, Where

AT = 1_790_000_000_000
"""2026-09-21T14:13:20Z"""


class AtStatus:
    """A layout of one placement."""

    def __init__(self, where: Where, status: MigrationStatus | None) -> None:
        stored = None if status is None else TableMigration(status, "w-1", AT)
        self._placement = Placement(where, stored)

    def placement(self) -> Placement:
        return self._placement

    def refuse_two_layouts(self) -> None:
        pass

    def refuse_old_workers(self) -> None:
        pass


@pytest.mark.parametrize(
    ("where", "status", "text"),
    [
        (Where.THREE, None, "has only leases: the three-table layout"),
        (
            Where.THREE,
            MigrationStatus.INIT,
            (
                "INIT, set by w-1 at 2026-09-21T14:13:20Z; TABLE_MIGRATION_STATUS_DEPLOYED comes "
                "next at 2026-09-21T15:13:20Z, if all workers still support it"
            ),
        ),
        (
            Where.DEPLOYED,
            MigrationStatus.DEPLOYED,
            (
                "TABLE_MIGRATION_STATUS_PENDING comes next when all workers run with "
                "leader.migrate_all_entities_to_lease_table, and none has reported into the "
                "worker-metrics table for 60 s"
            ),
        ),
        (
            Where.PENDING,
            MigrationStatus.PENDING,
            (
                "TABLE_MIGRATION_STATUS_COMPLETE comes next at 2026-09-22T14:13:20Z, if the "
                "workers keep leader.migrate_all_entities_to_lease_table"
            ),
        ),
        (Where.SINGLE, MigrationStatus.COMPLETE, "the single-table layout of KCL 3.5"),
    ],
)
def test_the_status_of_the_layout_has_a_next_step_and_a_time(where, status, text):
    found = check_layout(AtStatus(where, status), "orders", 86_400.0)
    assert found.level == "ok"
    assert text in found.text


def test_a_time_that_somebody_wrote_does_not_end_doctor():
    layout = AtStatus(Where.PENDING, MigrationStatus.PENDING)
    layout._placement = Placement(
        Where.PENDING, TableMigration(MigrationStatus.PENDING, "w", 10**30)
    )
    assert "an unknown time" in check_layout(layout, "orders", 60.0).text
