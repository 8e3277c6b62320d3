"""Specify the assets of a pipeline.

In reading order: the version of its code, metadata of the output table, and the specs of the
output, the streams and the fleet.
"""

import functools
import inspect
import logging
import math
import os
import subprocess
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import dagster as dg

from kcl_pipeline.batch import RECORD_SCHEMA, dead_letter_address
from kcl_pipeline.clock import Clock
from kcl_pipeline.delta.storage import delta_options, first_line
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.orchestration.names import Names, has_frames, stream_keys, table_uri
from kcl_pipeline.orchestration.options import DagsterOptions, PipelineLike
from kcl_pipeline.processors import ProcessorSink
from kcl_pipeline.status.streams import stream_name

# Find the version of the code of a pipeline, by which the sensor replaces workers.
#
# It is the option `Fleet(code_version=...)`, else the commit or the image of the code location,
# else none. It is found once, when the code is loaded.

VARIABLES: Final = ("DAGSTER_CLOUD_GIT_SHA", "DAGSTER_CURRENT_IMAGE")
"""Dagster+ sets the first one in a code location, and Dagster's deployments the second one."""
GIT_SECONDS: Final = 5.0
_CHARACTERS: Final = 40


def code_version(pipeline: PipelineLike) -> str | None:
    """Return the version of the code of a pipeline. None: it is not known."""
    given = pipeline.workers.code_version
    if given is not None:
        return given
    for name in VARIABLES:
        if value := os.environ.get(name):
            # The tag or the digest of an image is at its end
            return value[-_CHARACTERS:]
    folders = (file.parent for _, file in user_code(pipeline))
    return git_commit(next(folders, Path.cwd()))


def user_code(pipeline: PipelineLike) -> Iterator[tuple[Callable[..., Any], Path]]:
    """The user's functions and classes that are in a file, and the file of each."""
    for given in (
        pipeline.transform,
        pipeline.transform_arrow,
        getattr(pipeline.sink, "function", None),
        getattr(pipeline.sink, "processor", None),
    ):
        code: Any = given
        while isinstance(code, functools.partial):
            code = code.func
        if not callable(code):
            continue
        code = inspect.unwrap(code)
        if not hasattr(code, "__qualname__"):  # an object with __call__
            code = type(code)
        try:
            file = inspect.getsourcefile(code)
        except (OSError, TypeError):  # written in a console, or in C
            continue
        if file is not None:
            yield code, Path(file).resolve()


@functools.cache
def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder. None: there is none, or no Git."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(  # noqa: S603 (a fixed command)
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


# Describe the output table with the metadata that the Dagster UI knows: columns, rows, lineage.

COLUMNS: Final = "dagster/column_schema"
LINEAGE: Final = "dagster/column_lineage"
ROWS: Final = "dagster/row_count"
NAME: Final = "dagster/table_name"
COUNT_SHARE: Final = 0.05
"""Largest part of the time in which rows are counted."""

_log = logging.getLogger(__name__)


def record_columns() -> dg.TableSchema:
    """The columns of the records, which a stream gives to a transform."""
    return dg.TableSchema([dg.TableColumn(one.name, str(one.type)) for one in RECORD_SCHEMA])


def table_name(uri: str) -> str:
    """The last two parts of an address, as in `lake.orders`. `dagster/uri` has all of them."""
    path = uri.rpartition("://")[2]
    return ".".join(path.strip("/").split("/")[-2:])


def column_lineage(pipeline: PipelineLike, names: Names) -> dict[str, dg.TableColumnLineage]:
    """Where each column of the output comes from. Empty: a user's function decides it.

    Without a function, the table has the columns of the records.
    """
    functions = (pipeline.transform, pipeline.transform_arrow)
    if table_uri(pipeline.sink) is None or any(one is not None for one in functions):
        return {}
    streams = (names.selected_streams,) if names.selects_streams else names.streams_keys
    return {
        LINEAGE: dg.TableColumnLineage(
            {
                name: [dg.TableColumnDep(key, name) for key in streams]
                for name in RECORD_SCHEMA.names
            }
        )
    }


@dataclass(slots=True)
class OutputTable:
    """Reads columns and number of rows of the output from the log of its Delta table.

    Attributes:
        sink: The sink. One that is not a table has no metadata.
        clock: Measures how long the count takes.
        lineage: What `column_lineage` returns.
        count_at: When the rows are counted again, in monotonic seconds. Counting costs the more the
            more files the table has.
        latest: What was read last.
        reader: The thread of `metadata_within`. None: it was never called.
    """

    sink: Any
    clock: Clock
    lineage: Mapping[str, dg.TableColumnLineage]
    count_at: float = -math.inf
    latest: dict[str, Any] = field(default_factory=dict)
    reader: threading.Thread | None = None

    def metadata(self) -> dict[str, Any]:
        """Columns, rows and lineage as metadata. Empty: there is no table that can be read now."""
        uri = table_uri(self.sink)
        if uri is None:
            return {}
        # deltalake starts threads when it is loaded: load it only in the process that uses it.
        from deltalake import DeltaTable  # noqa: PLC0415
        from deltalake.exceptions import DeltaError  # noqa: PLC0415

        options = delta_options(uri, getattr(self.sink, "storage_options", {}))
        began = self.clock.monotonic()
        counts = began >= self.count_at
        try:
            table = DeltaTable(uri, storage_options=options, without_files=not counts)
            rows = {ROWS: table.count()} if counts else {}
            columns = [_column(one) for one in table.schema().fields]
        except (DeltaError, OSError, ValueError) as error:
            _log.warning("cannot read the output table: %s", first_line(error, options))
            return {}
        if counts:
            now = self.clock.monotonic()
            self.count_at = now + (now - began) / COUNT_SHARE
        return rows | {COLUMNS: dg.TableSchema(columns)} | dict(self.lineage)

    def metadata_within(self, seconds: float) -> dict[str, Any]:
        """Like `metadata`, for a caller that must not wait for a store that does not answer.

        Args:
            seconds: Longest wait. After it, the result is what was read last.
        """

        def read() -> None:
            self.latest = self.metadata()

        if self.reader is None or not self.reader.is_alive():
            self.reader = threading.Thread(target=read, name="output-table", daemon=True)
            self.reader.start()
        self.reader.join(seconds)
        return self.latest


def _column(column: Any) -> dg.TableColumn:
    return dg.TableColumn(
        column.name,
        _type_text(column.type),
        description=column.metadata.get("comment"),
        constraints=dg.TableColumnConstraints(nullable=column.nullable),
    )


def _type_text(kind: Any) -> str:
    """A type of Delta, as SQL writes it."""
    match kind.type:
        case "array":
            return f"array<{_type_text(kind.element_type)}>"
        case "map":
            return f"map<{_type_text(kind.key_type)}, {_type_text(kind.value_type)}>"
        case "struct":
            fields = ", ".join(f"{one.name}: {_type_text(one.type)}" for one in kind.fields)
            return f"struct<{fields}>"
        case text:
            return str(text)


# Specify the assets: the output, and as external assets the streams and the fleet.
#
# Dagster does not compute the external ones. The leader sensor reports their state.

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
        metadata["dead_letter_table"] = dg.MetadataValue.path(letters)
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
    table = {"deltalake"} if table_uri(pipeline.sink) else set[str]()
    return {"kinesis", "spark" if has_frames(pipeline) else "arrow"} | table


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
