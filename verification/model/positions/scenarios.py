"""The configurations of the positions models, and the rules that are removed one by one.

`verification.model.search` searches them. See docs/decisions/0007-positions-in-the-table.md.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from verification.model.positions.commits import Commits
from verification.model.positions.ends import Ends
from verification.model.positions.protocols import Protocols
from verification.model.positions.tables import Tables

Positions = Commits | Tables | Protocols
"""A configuration of one of the models; `Ends` is a `Commits`."""

_TAKER: Final = Commits("positions, two workers", moves=3, records=2)
_LOST: Final = Commits("positions, lost and late answers", moves=2, lost=1, records=2)
_ANNOUNCED: Final = Commits("positions, combined commits", moves=2, records=2, announces=True)
_TWO: Final = Commits("positions, two shards in a batch", shards=2, moves=2, records=1)
_SHARED: Final = Commits("positions, a shared worker id", (0, 0), moves=2, records=2, lost=1)
_JAVA: Final = Commits("positions, a Java worker", java=True, moves=2, records=2)
_ENDS: Final = Ends(
    "positions, parent and child", (0,), records=2, moves=1, at_latest=True, goes_on=True
)
_JAVA_ENDS: Final = Ends("positions, Java ends the parent", java=True, records=1, moves=1)
_REPLACED: Final = Tables("positions, a replaced table", accidents=1, records=2)
_RESTORED: Final = replace(_REPLACED, name="positions, a restored table", backups=True)
_SEEK: Final = Tables("positions, seek", seeks=1, records=2, moves=0)
_JAVA_SEEK: Final = replace(_SEEK, name="positions, seek after Java", java=True, moves=1)
_UPGRADE: Final = Protocols("positions, upgrade", records=1, moves=1)
_ONE_ID: Final = Protocols(
    "positions, upgrade under one worker id", ((0, True), (0, False)), records=1, moves=0
)
_DOWNGRADE: Final = Protocols("positions, downgrade", records=1, moves=0, downgrades=1)
_BACK: Final = replace(
    _DOWNGRADE,
    name="positions, downgrade under one worker id",
    processes=((0, False), (0, True)),
    upgrades=2,
)

SMALL: Final[tuple[Positions, ...]] = (
    _TAKER,
    _LOST,
    _ANNOUNCED,
    _TWO,
    _SHARED,
    _JAVA,
    _ENDS,
    _JAVA_ENDS,
    _REPLACED,
    _RESTORED,
    _SEEK,
    _JAVA_SEEK,
    _UPGRADE,
    _ONE_ID,
    _DOWNGRADE,
)
FULL: Final[tuple[Positions, ...]] = (
    *(
        replace(one, name=f"{one.name}, which goes on", goes_on=True)
        for one in (_TAKER, _LOST, _TWO, _JAVA, _JAVA_ENDS, _REPLACED, _RESTORED, _JAVA_SEEK)
    ),
    replace(_TAKER, name="positions, three workers", ids=(0, 1, 2)),
    replace(_LOST, moves=3, announces=True),
    replace(_TWO, lost=1, announces=True),
    replace(_SHARED, moves=3, announces=True),
    replace(_JAVA, moves=3, announces=True, lost=1),
    replace(_ENDS, ids=(0, 1)),
    replace(_JAVA_ENDS, moves=2),
    replace(_REPLACED, announces=True, moves=2),
    replace(_RESTORED, announces=True, records=3),
    replace(_JAVA_SEEK, announces=True),
    replace(_UPGRADE, records=2, moves=2),
    replace(_ONE_ID, records=2, lost=1),
    replace(_DOWNGRADE, records=2),
    _BACK,
)

GUARDS: Final[tuple[tuple[str, Positions], ...]] = (
    ("comparison", _TAKER),
    ("position of the table", _TAKER),
    ("position in the commit", _TAKER),
    ("condition of the row", _TAKER),
    ("checkpoint of a write", replace(_TAKER, records=3)),
    ("reading after a refusal", _TAKER),
    ("reading after a lost answer", _LOST),
    ("equal announcements", _ANNOUNCED),
    ("all shards of a batch", _TWO),
    ("checkpoint of Java", _JAVA),
    ("positions in the shard sync", _ENDS),
    ("waiting for an unfinished parent", _ENDS),
    ("parent in the table", _ENDS),
    ("end set by the child", _JAVA_ENDS),
    ("mark", _REPLACED),
    ("id in the comparison", _REPLACED),
    ("position in the comparison", replace(_RESTORED, records=3)),
    ("position in the mark", replace(_RESTORED, records=3)),
    ("row before the table", replace(_SEEK, moves=1)),
    ("second write of a seek", replace(_SEEK, moves=1)),
    ("row after the table", _JAVA_SEEK),
    ("marker in the log", _UPGRADE),
    ("pending batch in the move", _UPGRADE),
    ("position before the marker", _UPGRADE),
    ("row after the table in a move", _UPGRADE),
    ("fence of the move", _DOWNGRADE),
    ("checkpoint of the downgrade", replace(_DOWNGRADE, records=2)),
    ("row before the table in a downgrade", _DOWNGRADE),
    ("marker in the move", _BACK),
    ("last look of the downgrade", _BACK),
)
"""A rule, and a configuration that breaks without it."""
