"""The applications in which the cases run: layout, first side and version of Java."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .cases_layouts import begin_deployed, begin_init, begin_moving
from .catalogue import CASES
from .fleet import InteropFleet

PREPARED = (
    "prepared-handoff-for-ours",
    "prepared-handoff-for-java",
    "prepared-kill-for-ours",
    "prepared-kill-for-java",
)
SPECIAL = (*PREPARED, "join-of-java", "stays", "moved", "upgrade", "older", "recreated")
ALL = tuple(case.name for case in CASES if case.name not in SPECIAL)
DEPLOYED = (*ALL, "stays", "moved")
SHORT = (
    "join",
    "handoff-ours",
    "handoff-java",
    "split-ours",
    "merge",
    "foreign",
    "kill-java-leader",
)
TAKING = (
    "join",
    "split-ours",
    "split-java",
    "foreign",
    "aggregate-java",
    *(f"{by}-{side}-follower" for by in ("stop", "kill") for side in ("ours", "java")),
)
"""Java before 3.0 knows neither a leader nor handoffs."""
FEW = ("join", "handoff-ours", "handoff-java", "stop-ours-follower", "stop-java-follower")


@dataclass(frozen=True, slots=True)
class Plan:
    """One application of the suite.

    Attributes:
        name: Short name, and the name of the application.
        title: Heading of its column.
        family: Version of Java, a key of `java.VERSIONS`.
        first: The side that starts first.
        cases: Names of its cases, in order.
        short: Names of the cases that the short suite runs.
        options: Further fields of `Application`.
        prepare: Called before the first worker starts.
    """

    name: str
    title: str
    family: str
    first: str
    cases: Sequence[str] = ALL
    short: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[InteropFleet], None] | None = None


MOVES: dict[str, Any] = {
    "options": {"java_settings": {"coordinator.migrateAllEntitiesToLeaseTable": "true"}},
    "prepare": begin_moving,
}
TAKES: dict[str, Any] = {"leaderless": True, "settings": {"coordination": "leaderless"}}
UPGRADES: dict[str, Any] = {
    "leaderless": True,
    "settings": {"client_version_config": "CLIENT_VERSION_CONFIG_COMPATIBLE_WITH_2X"},
}
PLANS = (
    Plan("three-ours", "three tables, ours first", "3.5", "ours", short=SHORT),
    Plan("three-java", "three tables, Java first", "3.1", "java"),
    Plan(
        "single-ours",
        "single table, ours first",
        "3.5",
        "ours",
        options={"settings": {"table_layout": "single"}},
    ),
    Plan("single-java", "single table, Java first", "3.5", "java", short=SHORT),
    Plan(
        "deployed-ours",
        "three tables at `DEPLOYED`, Java set to move, ours first",
        "3.5",
        "ours",
        DEPLOYED,
        ("join", "stays"),
        **MOVES,
    ),
    Plan(
        "deployed-java",
        "three tables at `DEPLOYED`, Java first",
        "3.5",
        "java",
        prepare=begin_deployed,
    ),
    Plan("init", "three tables at `INIT`, Java first", "3.5", "java", FEW, prepare=begin_init),
    Plan(
        "taking-ours",
        '`coordination="leaderless"`, ours first',
        "2.7",
        "ours",
        TAKING,
        options=TAKES,
    ),
    Plan(
        "taking-java",
        '`coordination="leaderless"`, Java first',
        "2.7",
        "java",
        TAKING,
        ("join",),
        options=TAKES,
    ),
    Plan(
        "fan-out",
        "three tables, shared fan-out consumer",
        "3.5",
        "ours",
        FEW,
        options={"fan_out": True},
    ),
    Plan(
        "streams",
        "three tables, two streams",
        "3.5",
        "ours",
        FEW,
        options={"streams": 2, "shards": 2},
    ),
    Plan(
        "processors",
        "three tables, record processors on both sides",
        "3.5",
        "ours",
        ("join", "handoff-ours", "handoff-java", "split-ours", "merge", *PREPARED),
        options={"processor": True},
    ),
    Plan("again", "three tables, stream created again", "3.5", "ours", ("join", "recreated")),
    Plan(
        "upgrading",
        "moving from KCL 2.x, Java first",
        "2.7",
        "java",
        ("join",),
        options=UPGRADES,
    ),
    Plan(
        "older",
        "single table, older Java",
        "3.4",
        "ours",
        ("older",),
        ("older",),
        options={"settings": {"table_layout": "single"}},
    ),
    Plan(
        "defaults",
        "single table, default times, Java first",
        "3.5",
        "java",
        ("join", "join-of-java", "kill-ours-leader", "kill-java-leader"),
        options={"defaults": True},
    ),
)
