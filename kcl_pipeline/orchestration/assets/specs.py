"""Specify the assets: the output, and as external assets the streams and the fleet.

Dagster does not compute the external ones. The leader sensor reports their state.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import dagster as dg

from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.foreach import ForeachBatchSink
from kcl_pipeline.orchestration.assets.code_version import user_code
from kcl_pipeline.orchestration.assets.contract import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.assets.names import Names, stream_keys, table_uri
from kcl_pipeline.orchestration.assets.table import (
    COLUMNS,
    NAME,
    column_lineage,
    record_columns,
    table_name,
)
from kcl_pipeline.processors import ProcessorSink
from kcl_pipeline.status.streams import stream_name

STREAM_GROUP: Final = "kinesis"


def changed_spec(
    spec: dg.AssetSpec,
    options: DagsterOptions,
    get_asset_spec: Callable[[dg.AssetSpec], dg.AssetSpec],
    *,
    is_output: bool,
) -> dg.AssetSpec:
    """Apply the user's changes: `asset_attributes`, then the method of the component.

    Raises:
        SettingsError: A function changed the key, or returned something else.
    """
    given = options.asset_attributes
    changed: object = spec
    if callable(given):
        changed = given(spec)
    elif given and is_output:
        merged = {name: given[name] for name in ("metadata", "tags") if name in given}
        replaced = {name: value for name, value in given.items() if name not in merged}
        changed = spec.merge_attributes(**merged).replace_attributes(**replaced)
    if isinstance(changed, dg.AssetSpec):
        changed = get_asset_spec(changed)
    if not isinstance(changed, dg.AssetSpec):
        raise SettingsError(
            f"asset_attributes returned {type(changed).__name__} for the asset "
            f"{spec.key.to_user_string()}. Return an AssetSpec, such as "
            "spec.replace_attributes(kinds={'delta'})."
        )
    if changed.key != spec.key:
        raise SettingsError(
            f"asset_attributes gives the asset {spec.key.to_user_string()} the key "
            f"{changed.key.to_user_string()}. Keep the key; write the one of the output into "
            "output_asset_key of the pipeline."
        )
    return changed


def output_spec(
    pipeline: PipelineLike, names: Names, options: DagsterOptions, version: str | None
) -> dg.AssetSpec:
    """The asset of the output."""
    uri, letters = table_uri(pipeline.sink), dead_letter_address(pipeline.sink)
    metadata: dict[str, Any] = dict(column_lineage(pipeline, names))
    if uri:
        metadata |= {"dagster/uri": uri, NAME: table_name(uri)}
    if letters is not None:
        metadata["dead_letters"] = dg.MetadataValue.path(letters)
    with warnings.catch_warnings():
        # Dagster calls its classes for code references beta
        warnings.simplefilter("ignore", dg.BetaWarning)
        references: list[Any] = [*_code_references(pipeline)]
        if references:
            metadata["dagster/code_references"] = dg.CodeReferencesMetadataValue(
                code_references=references
            )
    return dg.AssetSpec(
        names.output,
        deps=[names.selected_streams] if names.selects_streams else list(names.streams_keys),
        group_name=group_of(names, options),
        kinds=_kinds(pipeline),
        owners=list(options.owners),
        tags=dict(options.tags),
        metadata=metadata,
        code_version=version,
        # A run without records materializes nothing
        skippable=True,
        description=(
            f"Output of `{names.application}`, which reads "
            f"{', '.join(f'`{s}`' for s in names.streams)}. A materialization runs one worker "
            "that reads up to the current end of every shard, commits, and stops. "
            f"The sensor `{names.leader_sensor}` keeps continuous workers running, as runs of "
            f"`{names.consume_job}`. {_guarantee(pipeline)}, with any number of workers. "
            "The values below are those of the last period in which data was committed, with its "
            "time. While nothing arrives, the plots go on, and the check `lag_below_threshold` "
            "says since when nothing has arrived, and whether records wait."
        ),
    )


def _kinds(pipeline: PipelineLike) -> set[str]:
    sink = pipeline.sink
    has_frames = pipeline.transform is not None or isinstance(sink, ForeachBatchSink)
    table = {"deltalake"} if table_uri(sink) else set[str]()
    return {"kinesis", "spark" if has_frames else "arrow"} | table


def _guarantee(pipeline: PipelineLike) -> str:
    if table_uri(pipeline.sink):
        return "Each record is in the table exactly once"
    if isinstance(pipeline.sink, ProcessorSink):
        return "The record processors get each record at least once"
    return "The function of the sink gets each record at least once"


def _code_references(pipeline: PipelineLike) -> Iterator[dg.LocalFileCodeReference]:
    """Where the user's functions are, so that the UI leads to them and not to this package."""
    for code, file in user_code(pipeline):
        try:
            _, line = inspect.getsourcelines(code)
        except OSError:  # written in a console
            continue
        yield dg.LocalFileCodeReference(
            file_path=str(file), line_number=line, label=code.__qualname__
        )


def group_of(names: Names, options: DagsterOptions) -> str:
    """The asset group of a pipeline. Default: the pipeline's name."""
    return options.group_name or names.prefix


def stream_specs(names: Names, options: DagsterOptions) -> list[dg.AssetSpec]:
    """The assets of the streams: of those in the settings, or of the selected ones."""
    if names.selects_streams:
        return [
            dg.AssetSpec(
                names.selected_streams,
                description="The Kinesis streams that are selected at run time, one partition per "
                "stream. The leader sensor adds and removes partitions. Each stream also has the "
                "page `kinesis/<name>`.",
                partitions_def=dg.DynamicPartitionsDefinition(name=names.stream_partitions),
                group_name=group_of(names, options),
                owners=list(options.owners),
                tags=dict(options.tags),
                kinds={"kinesis"},
                metadata={COLUMNS: record_columns()},
            )
        ]
    return [_stream_spec(name, key) for name, key in stream_keys(names.streams).items()]


def _stream_spec(name_or_arn: str, key: dg.AssetKey) -> dg.AssetSpec:
    """The asset of a stream.

    It depends only on the stream, so that pipelines with a common stream can be in one code
    location.
    """
    name = stream_name(name_or_arn)
    return dg.AssetSpec(
        key,
        description=f"The Kinesis stream `{name}`.",
        group_name=STREAM_GROUP,
        kinds={"kinesis"},
        metadata={
            "dagster/uri": name_or_arn if name_or_arn.startswith("arn:") else f"kinesis://{name}",
            COLUMNS: record_columns(),
        },
    )


def fleet_spec(pipeline: PipelineLike, names: Names, options: DagsterOptions) -> dg.AssetSpec:
    """The asset of the leases, the workers and the leader.

    It is beside the data, not in its lineage: no row of the output comes from a lease.
    """
    settings = pipeline.settings
    return dg.AssetSpec(
        names.fleet,
        description=f"What reads the streams of `{names.application}`: one lease per shard with "
        "its owner and checkpoint, the workers, also Java workers, and the leader. The sensor "
        f"`{names.leader_sensor}` reports it from the tables "
        f"`{settings.lease_table_name}`, `{settings.worker_metrics_table_name}` and "
        f"`{settings.coordinator_state_table_name}`.",
        metadata={"dagster/uri": f"dynamodb://{settings.lease_table_name}"},
        group_name=group_of(names, options),
        owners=list(options.owners),
        tags=dict(options.tags),
        kinds={"dynamodb"},
    )
