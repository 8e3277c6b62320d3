"""The client version of an application, on both kinds of tables (protocol §3.5)."""

import dataclasses

import pytest

from kcl_pipeline.errors import IncompatibleTableError
from kcl_pipeline.leases.coordinator import MigrationState
from kcl_pipeline.leases.layout import ensure_client_version, version_of_start
from tests.leases.test_state_tables import V3, migration_row

# fixtures
from tests.support.lease_tables import aws_fixture, client_fixture, tables_fixture  # noqa: F401


def test_a_fresh_application_is_at_3x(tables):
    made = ensure_client_version(tables.coordinator, "w1", tables.clock)
    assert tables.coordinator.read_migration() == made
    now = int(tables.clock.wall() * 1000)
    assert made == MigrationState(
        "CLIENT_VERSION_3X", "w1", now, (("CLIENT_VERSION_INIT", "w1", now),)
    )
    before = migration_row(tables)
    assert ensure_client_version(tables.coordinator, "w2", tables.clock) == made
    assert migration_row(tables) == before


def test_a_rollback_state_is_rolled_forward_and_remembered(tables):
    past = tuple((f"CLIENT_VERSION_{n}", "tool", n) for n in range(10))
    tables.coordinator.put_migration(
        MigrationState("CLIENT_VERSION_3X_WITH_ROLLBACK", "j1", 99, past), replacing=None
    )
    tables.plant(tables.coordinator, migration_row(tables) | {"future": {"S": "x"}})
    made = ensure_client_version(tables.coordinator, "w1", tables.clock)
    assert made.client_version == "CLIENT_VERSION_3X"
    assert made.history == (("CLIENT_VERSION_3X_WITH_ROLLBACK", "j1", 99), *past[:9])
    assert tables.coordinator.read_migration() == made
    assert migration_row(tables)["future"] == {"S": "x"}


def test_an_application_of_an_unknown_version_is_refused_untouched(tables):
    tables.coordinator.put_migration(MigrationState("CLIENT_VERSION_4X", "j1", 99), replacing=None)
    before = migration_row(tables)
    with pytest.raises(IncompatibleTableError, match="CLIENT_VERSION_4X"):
        ensure_client_version(tables.coordinator, "w1", tables.clock)
    assert migration_row(tables) == before


@pytest.mark.parametrize(
    ("stored", "with_3x", "with_2x"),
    [
        (None, "3X", "UPGRADE_FROM_2X"),
        ("INIT", "3X", "UPGRADE_FROM_2X"),
        ("UPGRADE_FROM_2X", "UPGRADE_FROM_2X", "UPGRADE_FROM_2X"),
        ("2X", "2X", "2X"),
        ("3X_WITH_ROLLBACK", "3X", "3X_WITH_ROLLBACK"),
        ("3X", "3X", "3X"),
    ],
)
def test_the_version_of_a_start_is_that_of_java(tables, stored, with_3x, with_2x):
    """As `MigrationClientVersionStateInitializer` decides (protocol §3.5)."""
    if stored is not None:
        state = MigrationState(f"CLIENT_VERSION_{stored}", "j1", 99)
        tables.coordinator.put_migration(state, replacing=None)
    before = migration_row(tables)
    config = "CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X"
    made = ensure_client_version(tables.coordinator, "w1", tables.clock, config)
    assert made.client_version == f"CLIENT_VERSION_{with_2x}"
    if stored == with_2x:
        assert migration_row(tables) == before
    else:
        assert made.history[0][0] == "CLIENT_VERSION_INIT"
    if stored not in (None, "INIT"):
        made = ensure_client_version(tables.coordinator, "w1", tables.clock)
        assert made.client_version == f"CLIENT_VERSION_{with_3x}"
    else:
        assert version_of_start("t", None) == f"CLIENT_VERSION_{with_3x}"


def test_losing_the_race_for_the_first_row_is_fine(tables):
    read = tables.coordinator.read_migration
    answers = [None]
    tables.coordinator.put_migration(dataclasses.replace(V3, modified_by="faster"), replacing=None)
    tables.coordinator.read_migration = lambda: answers.pop() if answers else read()
    assert ensure_client_version(tables.coordinator, "w1", tables.clock).modified_by == "faster"
