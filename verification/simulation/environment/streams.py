"""The streams of a simulated application: they come, go and return, in two accounts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.leases.row import Lease
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.kinesis.state import KinesisSettings
from kcl_pipeline.testing.kinesis.stream import Stream

OWN_ACCOUNT: Final = KinesisSettings().account
OTHER_ACCOUNT: Final = "210987654321"


def arn_of(account: str, name: str) -> str:
    """The ARN of a stream."""
    return f"arn:aws:kinesis:{KinesisSettings().region}:{account}:stream/{name}"


@dataclass(frozen=True, eq=False)
class Generation:
    """One stream from its creation to its deletion.

    Attributes:
        ref: The stream as the settings name it: its name, or its ARN in the other account.
        number: Counts the streams of this account and name, from 1.
        stream: The stream in the model of Kinesis. It stays readable after the deletion.
        is_multi: Whether lease keys contain the stream.
    """

    ref: str
    number: int
    stream: Stream
    is_multi: bool

    @cached_property
    def label(self) -> str:
        """A short name, which no other stream of the seed has."""
        account = "" if self.stream.account == OWN_ACCOUNT else f"{self.stream.account}."
        again = "" if self.number == 1 else f".{self.number}"
        return f"{account}{self.stream.name}{again}"

    @cached_property
    def prefix(self) -> str | None:
        """The attribute `stream` of its leases."""
        stream = self.stream
        epoch = stream.created_millis // 1000
        return f"{stream.account}:{stream.name}:{epoch}" if self.is_multi else None

    @cached_property
    def recreated_millis(self) -> int | None:
        """The attribute `recreated_millis` of its leases."""
        return None if self.is_multi or self.number == 1 else self.stream.created_millis

    def lease_key(self, shard_id: str) -> str:
        """The key of the row of a shard's lease."""
        return f"{self.prefix}:{shard_id}" if self.is_multi else shard_id

    def lease_name(self, shard_id: str) -> str:
        """The name of a shard's lease: account, stream, creation and shard.

        See `Lease.unique_key`.
        """
        time = self.recreated_millis
        return self.lease_key(shard_id) if time is None else f"{shard_id}@{time}"

    def has_column(self, column: str) -> bool:
        """Whether records of this stream may have this value in the column `stream`.

        A stream in the other account always has a namesake in the own one.
        """
        is_own = self.stream.account == OWN_ACCOUNT
        return column == self.stream.arn or (is_own and column == self.stream.name)


class Streams:
    """All streams of a seed, by account and name.

    Attributes:
        all: Every stream that was created, in order.
        current: The streams that exist, by reference.
        forgotten: Names of deleted streams of the own account whose record was deleted, too. A
            stream of this name in the other account has no known namesake.
    """

    def __init__(self, clock: Clock, *, is_multi: bool) -> None:
        self.model = KinesisModel(clock=clock)
        other = KinesisModel(clock=clock, settings=KinesisSettings(account=OTHER_ACCOUNT))
        self.models = {OWN_ACCOUNT: self.model, OTHER_ACCOUNT: other}
        self.all: list[Generation] = []
        self.current: dict[str, Generation] = {}
        self.forgotten: set[str] = set()
        self._is_multi = is_multi
        self._of_leases: dict[tuple[str | None, int | None], Generation] = {}
        self._of_names: dict[str, Generation] = {}

    def model_of(self, ref: str) -> KinesisModel:
        """The model of the account of a stream."""
        return self.models[ref.split(":")[4]] if ref.startswith("arn:") else self.model

    def arn_of(self, name_or_arn: str) -> str:
        """The ARN of a stream that has a name, or an ARN."""
        is_arn = name_or_arn.startswith("arn:")
        return name_or_arn if is_arn else arn_of(OWN_ACCOUNT, name_or_arn)

    def create(self, ref: str, shards: int) -> Generation:
        """Create a stream, for the first time or again."""
        model, name = self.model_of(ref), ref.rpartition("/")[2]
        model.call("CreateStream", StreamName=name, ShardCount=shards)
        number = 1 + sum(one.ref == ref for one in self.all)
        made = Generation(ref, number, model.stream(name), self._is_multi)
        self.all.append(made)
        self.current[ref] = self._of_leases[made.prefix, made.recreated_millis] = made
        return made

    def delete(self, ref: str) -> Generation:
        """Delete a stream with all of its records."""
        gone = self.current.pop(ref)
        self.model_of(ref).call("DeleteStream", StreamName=gone.stream.name)
        return gone

    def exists(self, generation: Generation) -> bool:
        """Whether a stream was not deleted."""
        return self.current.get(generation.ref) is generation

    def is_replaced(self, generation: Generation) -> bool:
        """Whether a stream was deleted, and another one has its account and name."""
        return generation.ref in self.current and not self.exists(generation)

    def of(self, lease: Lease) -> Generation | None:
        """The stream of a lease; None if no stream ever had this identity."""
        return self._of_leases.get((lease.stream, lease.recreated_millis))

    def of_name(self, lease_name: str) -> Generation | None:
        """The stream of a lease's name."""
        known = self._of_names.get(lease_name)
        if known is not None:
            return known
        key, _, time = lease_name.partition("@")
        identity = (key.rpartition(":")[0] or None, int(time) if time else None)
        stream = self._of_leases.get(identity)
        if stream is not None:  # one that is created later may have the name
            self._of_names[lease_name] = stream
        return stream

    def settled(self, generation: Generation) -> Stream:
        """The stream in the model, with due changes applied."""
        if self.exists(generation):
            self.model_of(generation.ref).stream(generation.stream.name)
        return generation.stream
