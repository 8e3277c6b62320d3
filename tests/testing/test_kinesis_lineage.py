"""Every record once and in order along the lineage of shards, whatever is put, split and merged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.shards import MAX_HASH_KEY
from kcl_pipeline.testing.clock import VirtualClock
from kcl_pipeline.testing.kinesis.model import KinesisModel
from kcl_pipeline.testing.kinesis.state import KinesisSettings
from tests.support.examples import examples

ZERO = "shardId-000000000000"


def model_with(shards: int = 1, **settings_: object) -> tuple[KinesisModel, VirtualClock]:
    clock = VirtualClock()
    model = KinesisModel(clock, KinesisSettings(**settings_))  # type: ignore[arg-type]
    model.create_stream("s", shards)
    return model, clock


def token_for(model: KinesisModel, shard: str = ZERO, kind: str = "TRIM_HORIZON") -> str:
    return str(
        model.call("GetShardIterator", StreamName="s", ShardId=shard, ShardIteratorType=kind)[
            "ShardIterator"
        ]
    )


# -- the property
# ----------------------------------------------------------------------------

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(1, 30), st.integers(0, 10_000)),
        st.tuples(st.just("split"), st.integers(0, 50), st.integers(2, 1000)),
        st.tuples(st.just("merge"), st.integers(0, 50), st.integers(0, 1)),
        st.tuples(st.just("scale"), st.integers(1, 9), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 3), st.just(0)),
    ),
    max_size=25,
)


def follow_lineage(model: KinesisModel, limit: int) -> list[tuple[str, str, bytes]]:
    """Read like a consumer that starts at the horizon: a child only after all its parents are at
    their end.
    """
    roots = model.call("ListShards", StreamName="s", ShardFilter={"Type": "AT_TRIM_HORIZON"})[
        "Shards"
    ]
    ready = [s["ShardId"] for s in roots]
    seen, finished = set(ready), set()
    records: list[tuple[str, str, bytes]] = []
    while ready:
        shard = ready.pop(0)
        token: str | None = token_for(model, shard)
        while token is not None:
            page = model.call("GetRecords", ShardIterator=token, Limit=limit)
            records += [
                (r["PartitionKey"], r["SequenceNumber"], r["Data"]) for r in page["Records"]
            ]
            token = page.get("NextShardIterator")
            if token is not None and not page["Records"]:
                assert page["MillisBehindLatest"] == 0
                break
            for child in page.get("ChildShards", ()):
                if (
                    set(child["ParentShards"]) <= finished | {shard}
                    and child["ShardId"] not in seen
                ):
                    seen.add(child["ShardId"])
                    ready.append(child["ShardId"])
        finished.add(shard)
    return records


@examples(60)
@given(ACTIONS, st.integers(1, 4), st.integers(1, 40))
def test_every_record_once_and_in_order_per_key_along_lineage(
    actions: list[tuple[str, int, int]], shards: int, limit: int
) -> None:
    model, clock = model_with(shards)
    written: dict[str, list[tuple[str, bytes]]] = {}
    count = 0
    for action, one, two in actions:
        opened = model.stream("s").open_shards
        if action == "put":
            data = [(f"key-{(i * two) % 7}", b"%d" % (count + i)) for i in range(one)]
            count += one
            for (key, value), put in zip(data, model.put("s", data), strict=True):
                written.setdefault(key, []).append((put.sequence_number, value))
        elif action == "split" and len(opened) < 12:
            shard = opened[one % len(opened)]
            keys = shard.hash_key_range
            if keys.end - keys.start > 10:
                model.split(
                    "s", shard.shard_id, keys.start + 2 + (keys.end - keys.start - 4) * two // 1000
                )
        elif action == "merge" and len(opened) > 1:
            at = one % (len(opened) - 1)
            pair = [opened[at].shard_id, opened[at + 1].shard_id]
            model.merge("s", pair[two], pair[1 - two])
        elif action == "scale" and len(opened) <= one * 2 and one <= len(opened) * 2:
            model.call(
                "UpdateShardCount",
                StreamName="s",
                TargetShardCount=one,
                ScalingType="UNIFORM_SCALING",
            )
        elif action == "wait":
            clock.advance(one)
        ranges = [
            (s.hash_key_range.start, s.hash_key_range.end) for s in model.stream("s").open_shards
        ]
        assert [r[0] for r in ranges] == [0, *(r[1] + 1 for r in ranges[:-1])]
        assert ranges[-1][1] == MAX_HASH_KEY
    found: dict[str, list[tuple[str, bytes]]] = {}
    for key, number, value in follow_lineage(model, limit):
        found.setdefault(key, []).append((number, value))
    assert found == written
    assert all(
        [int(n) for n, _ in pairs] == sorted(int(n) for n, _ in pairs) for pairs in found.values()
    )


def test_shards_at_the_horizon_cover_all_keys_after_a_longer_retention_period():
    """Removed shards do not come back, and their children stay listed."""
    model, clock = model_with(2)
    clock.sleep(60)
    model.call(
        "MergeShards",
        StreamName="s",
        ShardToMerge=ZERO,
        AdjacentShardToMerge="shardId-000000000001",
    )
    clock.sleep(25 * 3600)
    assert len(model.call("ListShards", StreamName="s")["Shards"]) == 1
    model.call("IncreaseStreamRetentionPeriod", StreamName="s", RetentionPeriodHours=48)
    at_horizon = model.call("ListShards", StreamName="s", ShardFilter={"Type": "AT_TRIM_HORIZON"})
    assert [shard["ShardId"] for shard in at_horizon["Shards"]] == ["shardId-000000000002"]
