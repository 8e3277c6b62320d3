"""`pipeline.distribution()`: leases by worker and group."""

from __future__ import annotations

from kcl_pipeline.leases.distribution import COLUMNS, distribution
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON


def lease(shard, owner=None, **changes):
    return Lease(f"shardId-{shard:012d}", TRIM_HORIZON, owner=owner, **changes)


def test_leases_are_counted_by_worker_and_group():
    frame = distribution(
        [
            lease(0, "b-2", throughput_kbps=3.0),
            lease(1, "a-1", throughput_kbps=1.5),
            lease(2, "a-1", throughput_kbps=2.0),
            lease(3, "a-1").with_(checkpoint=SHARD_END, throughput_kbps=9.0),
            lease(4, "b-2", checkpoint_owner="a-1"),
            lease(5),
        ],
        ["a-1", "b-3"],
        "-",
    )
    assert list(frame.itertuples(index=False, name=None)) == [
        ("", "", 1, 0, 0, 0.0),
        ("a", "a-1", 3, 1, 1, 3.5),
        ("b", "b-2", 1, 0, 0, 3.0),
        ("b", "b-3", 0, 0, 0, 0.0),
    ]
    assert frame.groupby("group")["leases"].sum().to_dict() == {"": 1, "a": 3, "b": 1}


def test_an_application_without_leases_has_the_columns():
    frame = distribution([], [], "-")
    assert len(frame) == 0
    assert {name: str(kind) for name, kind in frame.dtypes.items()} == COLUMNS
