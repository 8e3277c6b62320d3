"""A pipeline whose sink is a function: each call becomes one file in FLEET_LAKE/calls."""

import json
import os
import time
from pathlib import Path

import fleet
import pyarrow as pa

from kcl_pipeline import BatchIdentity, ForeachArrowSink, KinesisPipeline

CALLS = Path(os.environ["FLEET_LAKE"]) / "calls"


def keep(rows: pa.Table, identity: BatchIdentity) -> None:
    call = {
        "pid": os.getpid(),
        "at": time.time(),
        "leases": [one.lease_key for one in identity.ranges],
        "ids": rows["id"].to_pylist(),
    }
    CALLS.mkdir(exist_ok=True)
    partial = CALLS / f"{call['pid']}-{call['at']}.partial"
    partial.write_text(json.dumps(call))
    partial.rename(partial.with_suffix(".json"))


events = KinesisPipeline(
    name="fleet",
    streams=["events"],
    transform_arrow=fleet.ids,
    sink=ForeachArrowSink(keep),
    settings_overrides=fleet.SETTINGS,
)
