"""The keys of the coordinator-state rows (protocol §3, §4.1)."""

from __future__ import annotations

from typing import Final

LEADER_KEY: Final = "Leader"
MIGRATION_KEY: Final = "Migration3.0"
TABLE_MIGRATION_KEY: Final = "TableMigration3.5"
COORDINATOR_KEYS: Final = (LEADER_KEY, TABLE_MIGRATION_KEY, MIGRATION_KEY)
"""All of them. The last one has the pause, so it is deleted last."""
