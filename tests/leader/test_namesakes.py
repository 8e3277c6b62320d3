"""Streams of one name in two accounts, of which the settings name one that cannot be resolved."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.leader.streams import Streams
from kcl_pipeline.leases.application import ApplicationIdentity, RecordedStream
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.client import InMemoryKinesis
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.kinesis.state import KinesisSettings
from tests.support.streams_world import ForbiddenStreams, StreamsWorld

OWN, OTHER = KinesisSettings().account, "210987654321"


def arn(account, name):
    return f"arn:aws:kinesis:{KinesisSettings().region}:{account}:stream/{name}"


class TwoAccounts(ForbiddenStreams):
    """Describes and lists the streams of both accounts. A name is one of the own account."""

    def __init__(self, own, other, *forbidden):
        super().__init__(own, *forbidden)
        self.other = InMemoryKinesis(other)

    def resolve_stream(self, name_or_arn, *, multi_stream):
        if f":{OTHER}:" in name_or_arn:
            return self.other.resolve_stream(name_or_arn, multi_stream=multi_stream)
        return super().resolve_stream(name_or_arn, multi_stream=multi_stream)

    def list_shards(self, stream, *arguments):
        if stream.account == OTHER:
            return self.other.list_shards(stream, *arguments)
        return super().list_shards(stream, *arguments)

    def service_time(self, stream):
        if stream.account == OTHER:
            return self.other.service_time(stream)
        return super().service_time(stream)


class Fleet(StreamsWorld):
    """Both accounts have the streams `a` and `b`. All four are recorded."""

    def __init__(self):
        super().__init__("a", "b")
        self.other = KinesisModel(self.clock, settings=KinesisSettings(account=OTHER))
        for name in "ab":
            self.other.create_stream(name, 2)
        self.lead("first", "a", "b", arn(OTHER, "a"))
        self.workers.clear()
        record = self.coordinator.read_application()
        added = (*record.identity.streams, RecordedStream(arn(OTHER, "b")))
        changed = replace(record.identity, streams=added)
        assert self.coordinator.put_application(changed, replacing=record)
        self.clock.advance(120)

    def lead(self, name, *streams, forbidden=(), seconds=0):
        """Start a worker that only leads."""
        kinesis = TwoAccounts(self.model, self.other, *forbidden)
        worker = self.start(name, *streams, kinesis=kinesis)
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() <= until:
            self.clock.advance(worker.lead_tick())

    def has_leases(self, account, name):
        return any(key.startswith(f"{account}:{name}:") for key in self.leases.rows())


@pytest.mark.parametrize("forbidden", [(), ("b",)])
def test_a_missing_stream_does_not_hide_the_one_of_the_same_name_in_another_account(forbidden):
    """The stream of the other account never got leases."""
    fleet = Fleet()
    if not forbidden:
        fleet.delete("b")
    fleet.lead("old", "a", "b", forbidden=forbidden, seconds=60)
    assert fleet.has_leases(OTHER, "b")


def test_it_is_read_although_no_name_shows_which_account_is_the_own_one():
    fleet = Fleet()
    fleet.delete("a")
    fleet.delete("b")
    fleet.lead("old", "b", arn(OTHER, "a"), seconds=60)
    assert fleet.has_leases(OTHER, "b")


class Names:
    """The streams of a leader whose own stream `b` does not exist."""

    def __init__(self, *configured):
        clock = VirtualClock()
        models = [KinesisModel(clock, settings=KinesisSettings(account=a)) for a in (OWN, OTHER)]
        for model in models:
            model.create_stream("a", 1)
        settings = ConsumerSettings(application_name="app", streams=configured)
        kinesis = TwoAccounts(*models)
        self.streams = Streams(
            settings, kinesis, clock, lambda _event: None, "leader", rng=Random(1)
        )
        self.recorded = [RecordedStream(arn(account, "b")) for account in (OWN, OTHER)]
        self.streams.note_record(ApplicationIdentity("multi_stream", tuple(self.recorded)))
        self.streams.for_each(lambda _stream: None, [])


def orphans(names):
    """Those of the recorded streams that are former ones if they only have leases."""
    return names.streams.not_configured({one.account_and_name for one in names.recorded})


def test_a_former_stream_of_another_account_is_not_taken_for_the_missing_one():
    _own, other = (names := Names("a", "b")).recorded
    assert names.streams.names() == ("a", "b", other.arn)
    assert names.streams.former() == (other,)
    assert orphans(names) == {(OTHER, "b")}


def test_while_the_own_account_is_unknown_a_missing_stream_may_be_each_of_its_name():
    own, other = (names := Names("b", arn(OTHER, "a"))).recorded
    assert names.streams.names() == ("b", arn(OTHER, "a"), own.arn, other.arn)
    assert names.streams.former() == ()
    assert orphans(names) == set()


def test_a_missing_arn_names_the_stream_of_its_account_only():
    own, other = (names := Names("a", arn(OTHER, "b"))).recorded
    assert names.streams.names() == ("a", other.arn, own.arn)
    assert names.streams.former() == (own,)
    assert orphans(names) == {(OWN, "b")}
