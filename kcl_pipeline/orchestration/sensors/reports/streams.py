"""Report each stream of the application to Dagster, also those that appear at run time.

Every stream has the external asset `kinesis/<name>`. Dagster shows an asset that only has events,
so a stream that no definition names has its page and its plots at once. If the streams are selected
at run time, the asset `<application>/streams` has one partition per stream, too. It is in the asset
graph, upstream of the output.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import dagster as dg

from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.orchestration.assets.names import (
    Names,
    partition_key,
    stream_keys,
)
from kcl_pipeline.orchestration.assets.runs.metadata import MAX_ROWS, known, lag_text
from kcl_pipeline.status.snapshot import Snapshot, group_by_stream
from kcl_pipeline.status.streams import is_lease_stream
from kcl_pipeline.text import counted

STREAMS_PER_HOUR: Final = 20
"""With more streams, each one is reported less often, because events stay in Dagster's log."""


@dataclass(frozen=True, slots=True)
class StreamView:
    """One stream in one observation of the application.

    Attributes:
        name: Name or ARN.
        key: Asset key of the stream.
        leases: Its rows of the lease table.
        lag_millis: The largest lag of its shards. None: unknown.
        unread_shards: Number of its shards whose lag is not known yet.
    """

    name: str
    key: dg.AssetKey
    leases: tuple[Lease, ...]
    lag_millis: int | None = None
    unread_shards: int = 0

    @property
    def content(self) -> tuple[tuple[str, str | None, str | None, bool], ...]:
        """What is reported at once when it changes."""
        return tuple((le.lease_key, le.owner, le.checkpoint_owner, le.ended) for le in self.leases)

    def row(self) -> dict[str, Any]:
        """The row of this stream in a table."""
        return {
            "stream": self.name,
            "leases": len(self.leases),
            "lag": lag_text(self.lag_millis),
            "not read yet": self.unread_shards,
        }


def stream_views(snapshot: Snapshot) -> tuple[StreamView, ...]:
    """Divide leases and lags by stream."""
    streams, leases = snapshot.streams, snapshot.leases
    keys, groups = stream_keys(streams), group_by_stream(leases)
    single = groups.get(None)
    if single is not None and len(streams) == 1:
        name, lag = streams[0], snapshot.lag_seconds
        return (StreamView(name, keys[name], tuple(single), _millis(lag)),)
    lags = _lags(snapshot.live)
    by_name: dict[str, list[str]] = {}
    for serialized in groups.keys() | lags.keys():
        if serialized is not None:
            by_name.setdefault(serialized.split(":")[1], []).append(serialized)
    views = []
    for name in keys:
        bare = keys[name].path[-1]
        same = [one for one in by_name.get(bare, []) if is_lease_stream(name, one, streams)]
        known = [lag for one in same if (lag := lags.get(one, (None, 0))[0]) is not None]
        rows = tuple(lease for one in sorted(same) for lease in groups.get(one, ()))
        ages = (snapshot.unread.get(lease.lease_key) for lease in rows)
        known += [round(1000 * age) for age in ages if age is not None]
        unknown = sum(lags.get(one, (None, 0))[1] for one in same)
        views.append(StreamView(name, keys[name], rows, max(known, default=None), unknown))
    return tuple(views)


def _millis(seconds: float | None) -> int | None:
    return None if seconds is None else round(1000 * seconds)


def _lags(workers: Iterable[WorkerMetrics]) -> Mapping[str, tuple[int | None, int]]:
    """The largest lag, and the number of shards whose lag is unknown, by serialized stream."""
    lags: dict[str, tuple[int | None, int]] = {}
    for worker in workers:
        for one in () if worker.status is None else worker.status.streams:
            if one.stream.count(":") != 2:  # noqa: PLR2004 (account, name and epoch)
                continue
            millis, unknown = lags.get(one.stream, (None, 0))
            known = [lag for lag in (millis, one.millis) if lag is not None]
            lags[one.stream] = (max(known, default=None), unknown + one.unknown)
    return lags


def stream_events(
    view: StreamView, names: Names
) -> list[dg.AssetMaterialization | dg.AssetObservation]:
    """The events of one stream."""
    metadata = _metadata(view)
    events: list[dg.AssetMaterialization | dg.AssetObservation] = [
        dg.AssetObservation(view.key, metadata=metadata)
    ]
    if names.selects_streams:
        partition = partition_key(view.key)
        events.append(
            dg.AssetMaterialization(names.selected_streams, metadata=metadata, partition=partition)
        )
    return events


def _metadata(view: StreamView) -> dict[str, Any]:
    unfinished = [lease for lease in view.leases if not lease.ended]
    lag = lag_text(view.lag_millis)
    if view.unread_shards:
        lag += f"; not read yet: {counted(view.unread_shards, 'shard')}"
    return known(
        {
            "shards_with_lease": len(view.leases),
            "shards_being_read": len(unfinished),
            "kbps": round(sum(lease.throughput_kbps or 0.0 for lease in unfinished), 1),
            "lag": dg.MetadataValue.text(lag),
            "lag_seconds": None if view.lag_millis is None else view.lag_millis / 1000,
        }
    )


def worst_streams(views: Sequence[StreamView]) -> list[dict[str, Any]]:
    """Rows of a table: the streams with the largest lag; unknown lags first."""
    worst = sorted(views, key=lambda view: (view.lag_millis is not None, -(view.lag_millis or 0)))
    return [view.row() for view in worst[:MAX_ROWS]]


def partition_requests(
    names: Names, streams: Sequence[str], existing: Iterable[str]
) -> list[dg.AddDynamicPartitionsRequest | dg.DeleteDynamicPartitionsRequest]:
    """The changes that give the asset of the selected streams one partition per stream."""
    wanted = {partition_key(key) for key in stream_keys(streams).values()}
    found = set(existing)
    partitions = dg.DynamicPartitionsDefinition(name=names.stream_partitions)
    requests: list[dg.AddDynamicPartitionsRequest | dg.DeleteDynamicPartitionsRequest] = []
    if wanted - found:
        requests.append(partitions.build_add_request(sorted(wanted - found)))
    if found - wanted:
        requests.append(partitions.build_delete_request(sorted(found - wanted)))
    return requests
