"""What each side reports: the lines of a Java worker, and the count of every record.

A record of a Java worker counts as processed for good when the checkpoint of its batch was stored.
Before that, the KCL may deliver it again. A record of our workers counts when it is in the table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

UNREADABLE = re.compile(
    r"deserializ|unmarshal|unmarshall|NullPointerException|ClassCastException"
    r"|IllegalArgumentException|NumberFormatException|Illegal(?:ly)? formatted|malformed",
    re.IGNORECASE,
)
"""What Java logs about a row that it cannot read. Each line counts."""


LOST = re.compile(
    r"lease_lost .*lease_key=(\S+) reason=.*(?:not renewed in time|another worker has it)"
)
"""What our worker logs about a lease that expired, or was taken, without a handoff."""


def lost_leases(log: str) -> Counter[str]:
    """Return how often each lease was lost, from the log of our worker."""
    return Counter(LOST.findall(log))


@dataclass(frozen=True, slots=True)
class Event:
    """One line of `InteropWorker`, at a monotonic second: its kind, and its words."""

    at: float
    kind: str
    words: tuple[str, ...]

    @property
    def lease(self) -> str:
        """The shard, with its stream if the worker reads several."""
        return self.words[0]


@dataclass
class JavaLog:
    """Output of one Java worker, read while it grows.

    Attributes:
        path: The file.
        events: What the worker has printed.
        unreadable: Lines about rows that Java cannot read.
    """

    path: Path
    events: list[Event] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    _offset: int = 0

    def poll(self, now: float) -> None:
        """Read the complete lines that are new."""
        with self.path.open("rb") as file:
            file.seek(self._offset)
            text = file.read()
        complete = text[: text.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.decode(errors="replace").splitlines():
            if line.startswith("@"):
                kind, *words = line[1:].split()
                self.events.append(Event(now, kind, tuple(words)))
            elif UNREADABLE.search(line):
                self.unreadable.append(line)

    def seen(self, kind: str, since: float = 0.0) -> list[Event]:
        """Return the events of a kind from a time on."""
        return [one for one in self.events if one.kind == kind and one.at >= since]

    def delivered(self) -> Counter[str]:
        """Return how often each id was delivered."""
        return Counter(one.words[2] for one in self.seen("record"))

    def stored(self) -> Counter[str]:
        """Return how often each id was delivered in a batch whose checkpoint was stored."""
        batches = {one.words[1] for one in self.seen("checkpoint")}
        return Counter(one.words[2] for one in self.seen("record") if one.words[1] in batches)


@dataclass(frozen=True, slots=True)
class Count:
    """How the records that were sent arrived.

    Attributes:
        sent: Number of records.
        missing: Ids that no worker has processed.
        repeated: Ids that are processed for good more than once.
        again: Number of deliveries beyond the first, which includes batches of Java whose
            checkpoint was not stored.
    """

    sent: int
    missing: frozenset[str]
    repeated: frozenset[str]
    again: int


def count(sent: Iterable[str], table: Mapping[str, int], logs: Iterable[JavaLog]) -> Count:
    """Compare what was sent with our table and the logs of the Java workers."""
    wanted = set(sent)
    stored, delivered = Counter(table), Counter(table)
    for log in logs:
        stored.update(log.stored())
        delivered.update(log.delivered())
    return Count(
        len(wanted),
        frozenset(wanted - delivered.keys()),
        frozenset(one for one, times in stored.items() if times > 1),
        sum(times - 1 for times in delivered.values()),
    )
