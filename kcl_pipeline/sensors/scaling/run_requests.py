"""Build the run requests of continuous workers."""

from typing import Any
from uuid import uuid4

import dagster as dg

from kcl_pipeline.assets.contract import FleetLike
from kcl_pipeline.assets.names import VERSION_TAG, Names


def worker_request(
    names: Names, fleet: FleetLike, run_config: dict[str, Any], version: str
) -> dg.RunRequest:
    """Return the request of one worker run.

    Its run key is unique: Dagster never starts a second run with a used key.
    """
    return dg.RunRequest(
        run_key=f"{names.application}-{uuid4().hex}",
        run_config=run_config,
        tags={**fleet.run_tags, **names.worker_run_tags, VERSION_TAG: version},
    )
