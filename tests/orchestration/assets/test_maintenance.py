"""The job that compacts and vacuums the output."""

from __future__ import annotations

from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from kcl_pipeline import DeltaSink, KinesisPipeline

COUNTS = {"files_compacted": 3, "files_made": 1, "files_removed": 0, "bytes_removed": 0}


def figures(pipeline: KinesisPipeline, **config: Any) -> dict[str, Any]:
    """Run the job and return the metadata of its observation."""
    job = pipeline.definitions().resolve_job_def("orders_maintenance")
    done = job.execute_in_process(run_config={"ops": {"orders_maintain": {"config": config}}})
    (event,) = [
        one for one in done.all_events if one.event_type is dg.DagsterEventType.ASSET_OBSERVATION
    ]
    return {
        name: value.value
        for name, value in event.asset_observation_data.asset_observation.metadata.items()
    }


@pytest.fixture
def pipeline(tmp_path):
    return KinesisPipeline("orders", ["orders"], DeltaSink(str(tmp_path / "orders")))


def test_small_files_are_merged(pipeline):
    for number in range(3):
        write_deltalake(pipeline.sink.uri, pa.table({"id": [number]}), mode="append")
    assert COUNTS.items() <= figures(pipeline).items()
    assert len(DeltaTable(pipeline.sink.uri).file_uris()) == 1


@pytest.mark.parametrize("config", [{}, {"dry_run": True}, {"dead_letters": True}])
def test_a_table_that_does_not_exist_yet_is_no_failure(pipeline, config):
    """The schedule may begin before the first batch. `kcl-pipeline compact` does the same."""
    assert figures(pipeline, **config) == {"exists": False}
    write_deltalake(str(pipeline.sink.dead_letters), pa.table({"id": [1]}))
    found = figures(pipeline, **config)
    assert found.pop("exists") is False
    assert ("dead_letter_files_removed" in found) is config.get("dead_letters", False)
