"""What `doctor` says about the layout of the tables."""

from __future__ import annotations

import pytest

from kcl_pipeline.cli.doctor.records import check_layout
from tests.support.layouts import LayoutWorld


def world_at(status: str | None, *, wanted: str = "auto") -> LayoutWorld:
    world = LayoutWorld()
    world.start(wanted)
    if status is not None:
        world.state.plant(
            {"key": {"S": "TableMigration3.5"}, "tm": {"S": f"TABLE_MIGRATION_STATUS_{status}"}}
        )
    return world


@pytest.mark.parametrize(
    ("status", "level", "text"),
    [
        (None, "ok", "has only leases: the three-table layout"),
        ("INIT", "ok", "Java workers have set TABLE_MIGRATION_STATUS_INIT"),
        ("DEPLOYED", "ok", "no Java leader moves the application while a worker of this package"),
        ("PENDING", "problem", "Java workers move the application to the single table app at"),
        ("COMPLETE", "ok", "the single-table layout of KCL 3.5"),
        ("NEW", "problem", "unknown status"),
    ],
)
def test_each_status_of_the_layout_has_a_sentence(status, level, text):
    found = check_layout(world_at(status).open().layout, "app")
    assert found.level == level
    assert text in found.sentence
