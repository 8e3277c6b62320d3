"""Leases by key and by stream, so that the work of a cycle grows with the number of leases."""

from __future__ import annotations

from collections.abc import Iterable

from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.shards import StreamId

_Group = tuple[str | None, int | None]


class LeaseMap(dict[str, Lease]):
    """The leases of a cycle by key. A stream is found without a search through all leases.

    Leases change by `leases[key] = lease` and `del leases[key]` only.
    """

    def __init__(self, leases: Iterable[Lease] = ()) -> None:
        super().__init__()
        self._groups: dict[_Group, dict[str, Lease]] = {}
        for lease in leases:
            self[lease.lease_key] = lease

    def __setitem__(self, key: str, lease: Lease) -> None:
        """Add or replace a lease."""
        group = (lease.stream, lease.recreated_millis)
        before = self.get(key)
        if before is not None and (before.stream, before.recreated_millis) != group:
            del self[key]
        super().__setitem__(key, lease)
        self._groups.setdefault(group, {})[key] = lease

    def __delitem__(self, key: str) -> None:
        """Remove a lease."""
        lease = self[key]
        super().__delitem__(key)
        del self._groups[lease.stream, lease.recreated_millis][key]

    def streams(self) -> list[str]:
        """Return the serialized streams that have leases."""
        return [stream for (stream, _), rows in self._groups.items() if stream and rows]

    def of_stream(self, stream: StreamId) -> list[Lease]:
        """Return the leases of a stream, in the order in which they were added."""
        wanted = stream.serialized if stream.creation_epoch is not None else None
        return list(self._groups.get((wanted, stream.recreated_millis), {}).values())
