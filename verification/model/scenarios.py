"""The configurations of the models, and the rules that are removed one by one.

Each clause of the commit protocol (docs/decisions/0007-positions-in-the-table.md) has a variant
without it, and the smallest configuration in which the search finds what breaks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from verification.model.commits import Commits
from verification.model.leases import Leases
from verification.model.values import NOBODY

Model = Commits | Leases

_TWO_GENERATIONS: Final = (NOBODY, 0)
_THREE_GENERATIONS: Final = (NOBODY, 0, 1)
_SPLIT: Final = (NOBODY, 0, 0)

_TAKER: Final = Commits("two workers", moves=2, deletes=True)
_LOST: Final = Commits("lost and late answers", lost=1)
_ANNOUNCED: Final = Commits("combined commits", announces=True)
_TWO: Final = Commits("two shards in a batch", parents=(NOBODY, NOBODY), moves=1, records=1)
_SHARED: Final = Commits("a shared worker id", (0, 0), lost=1)
_JAVA: Final = Commits("a Java worker", java=True)
_ENDS: Final = Commits(
    "parent and child, rows that are deleted",
    (0,),
    _TWO_GENERATIONS,
    moves=1,
    deletes=True,
    at_latest=True,
    goes_on=True,
)
_JAVA_ENDS: Final = Commits(
    "Java ends the parent", parents=_TWO_GENERATIONS, java=True, records=1, moves=1
)
_BEGUN: Final = replace(_JAVA_ENDS, name="Java begins the child", ids=(0,), records=2)
_THREE: Final = Commits(
    "three generations, Java has the second one",
    (0,),
    _THREE_GENERATIONS,
    java=True,
    records=1,
    moves=1,
)
_CHILDREN: Final = Commits("two children of a parent", (0,), _SPLIT, records=1, moves=1)
_REPLACED: Final = Commits("a replaced table", accidents=1, moves=1)
_OLDER: Final = replace(_REPLACED, name="a table that is put back or restored", backups=True)
_SEEK: Final = Commits("a seek", seeks=1, moves=0)
_JAVA_SEEK: Final = replace(_SEEK, name="a seek after Java", java=True, records=1, moves=1)
_JAVA_LEADS: Final = replace(
    _SEEK, name="a seek while a Java leader assigns", ids=(0,), java_leads=True, moves=1
)
_DELETED_SEEK: Final = Commits("a seek of a deleted row", records=1, deletes=True, seeks=1)
_FAMILY: Final = Commits("a seek of a parent", (0,), _TWO_GENERATIONS, records=1, moves=0, seeks=1)

_MOVES: Final = Leases("leases: two workers", records=1, lost=1)
_ONE_ID: Final = Leases(
    "leases: a shared worker id", (0, 0), moves=2, lost=1, renewals=1, handoffs=False
)
_CHILD: Final = Leases("leases: parent and child", shards=2, records=1)
_BORN: Final = Leases(
    "leases: a child that is created at the end",
    (0, 0),
    2,
    records=1,
    moves=2,
    lost=1,
    handoffs=False,
    lineage=True,
    born=True,
)
_DELETED: Final = Leases(
    "leases: the deleted row of a parent",
    shards=2,
    records=1,
    handoffs=False,
    lineage=True,
    deletions=1,
)

SMALL: Final[tuple[Model, ...]] = (
    _TAKER,
    _LOST,
    _ANNOUNCED,
    _TWO,
    _SHARED,
    _JAVA,
    _ENDS,
    _JAVA_ENDS,
    _BEGUN,
    _THREE,
    _CHILDREN,
    _REPLACED,
    _OLDER,
    _SEEK,
    _JAVA_LEADS,
    _FAMILY,
    _MOVES,
    _ONE_ID,
    _CHILD,
    _BORN,
    _DELETED,
)
GUARDS: Final[tuple[tuple[str, Model], ...]] = (
    # Commits
    ("comparison", _TAKER),
    ("position in the commit", _TAKER),
    ("all shards of a batch", _TWO),
    ("reading after a refusal", _TAKER),
    ("reading after a lost answer", _LOST),
    ("equal announcements", _ANNOUNCED),
    ("id of the table", _REPLACED),
    ("id before the files", _REPLACED),
    ("position in the comparison", _OLDER),
    ("number in the comparison", _FAMILY),
    # A taker
    ("position of the table", _TAKER),
    ("checkpoint of Java", _JAVA),
    ("end of the row", _JAVA_ENDS),
    ("row before the table in a taking", _TAKER),
    ("renewal before a start", _JAVA_SEEK),
    ("renewal before a stop", replace(_SEEK, moves=1)),
    ("renewal before an end", _FAMILY),
    # The row
    ("condition of a write", _TAKER),
    ("checkpoint of a write", replace(_TAKER, moves=3, records=3)),
    ("second resolution", _SHARED),
    ("counter in the adoption", _SEEK),
    ("mark", _REPLACED),
    ("mark behind the checkpoint", replace(_REPLACED, java=True, moves=2)),
    ("mark of the table", _JAVA),
    ("mark in an acceptance", _REPLACED),
    # Parents and children
    ("ancestors in a commit", _JAVA_ENDS),
    ("ancestors in an end", replace(_JAVA_ENDS, moves=2)),
    ("ancestors of the parent", _THREE),
    ("unknown ancestors", _JAVA_ENDS),
    ("ancestors after a refusal", replace(_JAVA_ENDS, goes_on=True)),
    ("ancestors apart from their children", _BEGUN),
    ("rows of parents", replace(_JAVA_ENDS, early=True)),
    ("unfinished parents", _ENDS),
    ("parent in the table", _ENDS),
    ("positions in the sync", _ENDS),
    ("begun shards in the sync", _BEGUN),
    ("row of a begun shard", _BEGUN),
    ("begun shards in the wait", replace(_BEGUN, moves=2, goes_on=True)),
    # A seek
    ("rows before the table", replace(_SEEK, moves=1)),
    ("second write of a seek", replace(_JAVA_LEADS, records=1, moves=2)),
    ("mark in a seek", _SEEK),
    ("counter of a seek", _DELETED_SEEK),
    ("number of a seek", _FAMILY),
    ("entry after a seek", replace(_FAMILY, announces=True)),
    ("descendants in a seek", _FAMILY),
    ("unknown descendants in a seek", _FAMILY),
    ("rows of descendants in a seek", _FAMILY),
    ("listing after the table", replace(_FAMILY, reshards=True, java_leads=True, moves=1)),
    # Leases with a sink that stores no positions
    ("row condition", _MOVES),
    ("owner condition", _MOVES),
    ("counter of an assignment", _MOVES),
    ("counter of a handoff", _MOVES),
    ("checkpoint in the adoption", _ONE_ID),
    ("parent check", _CHILD),
    ("parent in the creation", _BORN),
    ("step forward", _BORN),
    ("begin of the child", _BORN),
    ("restored parent", _DELETED),
    ("child in the restoration", replace(_DELETED, deletions=0, moves=4)),
)
"""A rule, and a configuration that breaks without it."""


FULL: Final[tuple[Model, ...]] = (
    *(
        replace(one, name=f"{one.name}, which goes on", goes_on=True)
        for one in (_LOST, _ANNOUNCED, _SHARED, _JAVA, _JAVA_ENDS, _BEGUN, _CHILDREN, _REPLACED)
    ),
    replace(_TAKER, moves=3),
    replace(_TAKER, name="three workers", ids=(0, 1, 2)),
    replace(_LOST, announces=True, records=3),
    replace(_TWO, lost=1, announces=True),
    replace(_SHARED, announces=True, deletes=True),
    replace(_JAVA, moves=3, announces=True, lost=1),
    replace(_ENDS, ids=(0, 1)),
    replace(_ENDS, lost=1, announces=True, at_latest=False),
    replace(_JAVA_ENDS, announces=True, lost=1),
    replace(_BEGUN, moves=2, deletes=True),
    replace(_THREE, ids=(0, 1)),
    replace(_THREE, announces=True),
    replace(_CHILDREN, java=True),
    replace(_REPLACED, moves=2, java=True),
    replace(_REPLACED, announces=True, lost=1),
    replace(_OLDER, moves=2),
    replace(_OLDER, announces=True, records=3),
    replace(_SEEK, moves=1),
    replace(_SEEK, announces=True),
    _JAVA_SEEK,
    replace(_JAVA_LEADS, announces=True),
    replace(_FAMILY, ids=(0, 1), announces=True),
    replace(_FAMILY, reshards=True, java_leads=True, moves=1),
    replace(_MOVES, records=2, moves=4),
    replace(_MOVES, ids=(0, 1, 2)),
    replace(_ONE_ID, ids=(0, 0, 1), moves=3),
    replace(_CHILD, moves=4, lost=1),
    replace(_BORN, moves=3, renewals=1),
    replace(_DELETED, moves=4, lost=1, records=2),
    *dict.fromkeys(model for _, model in GUARDS if model not in SMALL),
)
"""Larger bounds, and every configuration of `GUARDS` that is not in `SMALL`."""


def without(guard: str) -> Model:
    """Return the configuration that detects the missing guard.

    Raises `KeyError` for an unknown guard.
    """
    return replace(dict(GUARDS)[guard], without=guard)
