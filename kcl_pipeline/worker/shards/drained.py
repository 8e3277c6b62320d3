"""The streams that a drain waits for, and what is lost if one of them is deleted meanwhile."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Final

from kcl_pipeline.errors import AwsError, NotFoundError, StreamReplacedError
from kcl_pipeline.events import (
    AwsTrouble,
    LossReason,
    RecordsLost,
    StreamUnavailable,
)
from kcl_pipeline.kinesis.identity import StreamIdentityCheck
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.position import Position
from kcl_pipeline.shards import HashKeyRange, Shard, StreamId
from kcl_pipeline.worker.dependencies import WorkerDependencies

LOOK_SECONDS: Final = 5.0
"""Time between two descriptions of a stream that may be deleted."""


AccountAndName = tuple[str | None, str]


def by_name(leases: Iterable[Lease]) -> dict[AccountAndName | None, list[Lease]]:
    """Return the leases by account and name of their stream; None: their keys have no stream."""
    names: dict[str | None, AccountAndName | None] = {None: None}
    found: dict[AccountAndName | None, list[Lease]] = {}
    for lease in leases:
        if lease.stream is not None and lease.stream not in names:
            stream = StreamId.parse(lease.stream)
            names[lease.stream] = stream.account, stream.name
        found.setdefault(names[lease.stream], []).append(lease)
    return found


class DrainedStream:
    """One stream of the start of a drain. Another one that has its name later is not waited for.

    A stream counts as deleted only if this is proven: its description says that it does not exist
    or was created later, or the table has leases of a later stream of its name. A stream whose
    description fails otherwise is waited for.

    Args:
        stream: The stream as it was resolved at the start of the worker.
        dependencies: The dependencies of the worker. Their sink of events receives
            `StreamUnavailable` and `RecordsLost` for a deleted stream, and `AwsTrouble` for a
            description that fails.
        identity: Confirms that the stream exists.

    Attributes:
        is_deleted: Whether the stream is proven to be deleted.
    """

    def __init__(
        self, stream: StreamId, dependencies: WorkerDependencies, identity: StreamIdentityCheck
    ) -> None:
        self.is_deleted = False
        self._stream = stream
        self._dependencies = dependencies
        self._identity = identity
        self._due = dependencies.clock.monotonic() + LOOK_SECONDS
        self._had_leases = False
        self._listed: tuple[Shard, ...] | None = None
        self._unread: dict[str, tuple[Lease, Position | None]] = {}
        self._reported: set[str] = set()

    @property
    def name_of_leases(self) -> AccountAndName | None:
        """The key of the leases of this stream, and of later ones of its name, in `by_name`."""
        stream = self._stream
        return None if stream.creation_epoch is None else (stream.account, stream.name)

    def owns(self, lease: Lease) -> bool:
        """Return whether the lease is of this stream, and not of another one of its name."""
        stream = self._stream
        if lease.stream is None or stream.creation_epoch is None:
            is_of_this_stream = stream.created_millis in (None, lease.recreated_millis)
            return lease.stream is None and (
                lease.recreated_millis == stream.recreated_millis or is_of_this_stream
            )
        return lease.stream == stream.serialized

    def has_row(self, lease_key: str) -> bool:
        """Return whether a row of this key, whose other attributes are unreadable, may be its."""
        return lease_key.startswith(self._stream.lease_key(""))

    def ranges_of(self, lease_keys: Container[str]) -> tuple[HashKeyRange, ...]:
        """Return the hash ranges of these leases, from the listing of the stream's shards.

        The listing is read once. None, if it cannot be read now.
        """
        if self._listed is None:
            try:
                self._listed = tuple(self._dependencies.kinesis.list_shards(self._stream))
            except AwsError as error:
                what = f"ListShards of {self._stream.name} for the drain"
                self._dependencies.events(AwsTrouble(what, str(error)))
                return ()
        return tuple(
            shard.hash_key_range
            for shard in self._listed
            if self._stream.lease_key(shard.shard_id) in lease_keys
        )

    def _is_followed_by(self, lease: Lease) -> bool:
        """Return whether the lease is of a later stream of the same name."""
        stream = self._stream
        if lease.stream is None or stream.creation_epoch is None:
            return lease.stream is None and (lease.recreated_millis or 0) > (
                stream.created_millis or 0
            )
        other = StreamId.parse(lease.stream)
        is_same_name = (other.account, other.name) == (stream.account, stream.name)
        return is_same_name and (other.creation_epoch or 0) > stream.creation_epoch

    def note(
        self, leases: Iterable[Lease], unread: Iterable[tuple[Lease, Position | None]]
    ) -> None:
        """Note the leases of the stream in the table.

        A lease without a row keeps its last state: the leader deletes the leases of a stream that
        was created again.

        Args:
            leases: All leases of the stream.
            unread: Those that no worker but this one can read, and that this worker has not read
                since the drain began, with the last committed position (inclusive) if it is known.
        """
        for lease in leases:
            self._had_leases = True
            self._unread.pop(lease.unique_key, None)
        self._unread.update({pair[0].unique_key: pair for pair in unread})

    def look(self, leases: Iterable[Lease], *, is_in_doubt: bool) -> None:
        """Find out whether the stream was deleted, and report what is lost then.

        The stream is described only if `is_in_doubt`.

        Args:
            leases: All leases in the table that may be of a stream of this name.
            is_in_doubt: Whether a step of an unread shard has failed, or a lease is missing.
        """
        if not self.is_deleted:
            if any(not self.owns(lease) and self._is_followed_by(lease) for lease in leases):
                self._deleted("the table has leases of a later stream of this name")
            elif is_in_doubt:
                self._describe()
        if self.is_deleted:
            self._report()

    def _describe(self) -> None:
        now = self._dependencies.clock.monotonic()
        if now < self._due:
            return
        self._due = now + LOOK_SECONDS
        try:
            self._identity.confirm(self._stream, now)
        except (NotFoundError, StreamReplacedError) as error:
            self._deleted(str(error))
        except AwsError as error:
            self._dependencies.events(
                AwsTrouble(f"look for {self._stream.name} in the drain", str(error))
            )

    def _deleted(self, reason: str) -> None:
        self.is_deleted = True
        name = self._stream.arn or self._stream.name
        self._dependencies.events(StreamUnavailable(self._dependencies.worker_id, name, reason))

    def _report(self) -> None:
        for key, (lease, after) in sorted(self._unread.items()):
            if key not in self._reported:
                self._reported.add(key)
                self._dependencies.events(
                    RecordsLost(
                        self._dependencies.worker_id,
                        lease.lease_key,
                        LossReason.STREAM_DELETED,
                        after,
                        stream=self._stream.name,
                    )
                )

    @property
    def sentence(self) -> str | None:
        """A sentence that says what was not read. None: nothing is known to be lost."""
        if not self.is_deleted or (self._had_leases and not self._reported):
            return None
        what = f"{len(self._reported)} of its shards were" if self._had_leases else "it was"
        return f"the stream {self._stream.name} was deleted during the drain; {what} not read"
