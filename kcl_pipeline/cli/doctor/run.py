"""Run the checks of `kcl-pipeline doctor`, cheapest first."""

import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from kcl_pipeline.cli.doctor import checks, permissions
from kcl_pipeline.cli.doctor.application import check_application
from kcl_pipeline.cli.doctor.dagster_instance import check_instance, longest_stop_seconds
from kcl_pipeline.cli.doctor.dead_letters import dead_letter_table
from kcl_pipeline.cli.doctor.finding import ok, problem, unknown
from kcl_pipeline.cli.doctor.metrics import check_metrics
from kcl_pipeline.cli.doctor.migration import check_client_version, check_layout
from kcl_pipeline.cli.target import Target
from kcl_pipeline.errors import KclError, SettingsError
from kcl_pipeline.leases.application.recorded_stream import streams_to_read
from kcl_pipeline.planning import strategies
from kcl_pipeline.settings_errors import without_credentials
from kcl_pipeline.shards import StreamId
from kcl_pipeline.status.findings import CheckName, Finding, FindingLevel, findings_of
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.status.snapshot import Snapshot, look_twice, read_snapshot


def run_checks(app: Target, *, needs_java: bool, watch_seconds: float) -> Iterator[Finding]:
    """Run all checks, cheapest first. Checks that depend on a failed one are skipped."""
    yield from _settings(app)
    yield checks.check_java(needed=needs_java)
    credentials = _credentials(app)
    yield credentials
    if credentials.level is FindingLevel.PROBLEM:
        yield unknown("AWS", "tables and streams were not checked: there are no credentials")
    else:
        yield from _aws(app, watch_seconds)
    if app.pipeline is not None:
        yield from _output(app.pipeline)
        yield from _dead_letters(app)
        yield from _dagster(app, app.pipeline)


def _aws(app: Target, watch_seconds: float) -> Iterator[Finding]:
    usable = yield from _tables(app)
    streams = yield from _streams(app)
    yield from check_metrics(app.settings, app.clients)
    if usable:
        yield from _rows(app, streams, watch_seconds)


def _output(pipeline: Any) -> Iterator[Finding]:
    from kcl_pipeline.cli.doctor.output import check_output  # noqa: PLC0415 (Delta)

    yield from check_output(pipeline.sink, pipeline.name)


def _dead_letters(app: Target) -> Iterator[Finding]:
    table = dead_letter_table(app.pipeline)
    if table is not None:
        from kcl_pipeline.cli.doctor.dead_letters import check_dead_letters  # noqa: PLC0415 (Delta)

        yield from check_dead_letters(*table, app.clock)


def _dagster(app: Target, pipeline: Any) -> Iterator[Finding]:
    """Check the Dagster instance. The code of a pipeline has loaded Dagster already."""
    from kcl_pipeline.orchestration.assets.names import Names  # noqa: PLC0415 (see above)
    from kcl_pipeline.orchestration.assets.runs.queue import tag_limits_of  # noqa: PLC0415

    tags = {**pipeline.workers.run_tags, **Names.of(pipeline).worker_run_tags}

    def limits(configured: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
        return [
            (key if value is None else f"{key}: {value}", limit)
            for key, value, limit in tag_limits_of(configured, tags)
        ]

    stop = longest_stop_seconds(app.settings.worker.stop_timeout_millis)
    yield from check_instance(os.environ.get("DAGSTER_HOME"), pipeline.workers, limits, stop)


def _settings(app: Target) -> Iterator[Finding]:
    try:
        strategies.get(app.settings.assignment.lease_assignment_strategy)
    except SettingsError as error:
        yield problem("settings", str(error), "write one of the names above")
    else:
        yield ok(
            "settings",
            f"application {app.settings.application_name}, streams "
            f"{', '.join(app.settings.streams) or 'selected at run time'}",
        )


def _credentials(app: Target) -> Finding:
    try:
        client = app.clients.dynamodb
        if not app.clients.has_credentials():
            return problem(
                "credentials",
                "not found",
                "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or use an "
                "instance role",
            )
    except SettingsError as error:
        return problem(
            "AWS session", str(error), "set AWS_REGION, and an existing AWS_PROFILE or access keys"
        )
    endpoint = without_credentials(client.meta.endpoint_url)
    return ok("credentials", f"found; region {client.meta.region_name}, DynamoDB at {endpoint}")


def _tables(app: Target) -> Generator[Finding, None, bool]:
    """Check the tables and the permissions on them. Returns whether all can be used."""
    client, layout = app.clients.dynamodb, app.tables.layout
    try:
        tables = layout.tables()
    except KclError:  # the checks of the tables find the reason
        tables = layout.three_tables()
    usable = True
    for use in tables:
        table, key_name = use.name, use.key_name
        finding, exists = checks.check_table(client, table, key_name, has_index=use.has_leases)
        yield finding
        if not exists:
            usable = False
            yield unknown(
                f"table {table}",
                "permissions were not checked; to create the table, the first worker also needs "
                "dynamodb:CreateTable and dynamodb:UpdateTable",
            )
            continue
        allowed = True
        probes = permissions.table_probes(client, table, key_name, permissions.actions_on(use))
        for found in permissions.probe_all(f"table {table}", probes):
            allowed = allowed and found.level is FindingLevel.OK
            yield found
        usable = usable and allowed
        if use.has_leases and allowed:
            yield check_layout(layout, table)
    return usable


def _streams(app: Target) -> Generator[Finding, None, list[StreamId]]:
    """Check the permissions on the streams. Returns the streams that can be read."""
    readable: list[StreamId] = []
    multi_stream = app.settings.is_multi_stream
    names = app.settings.streams
    if app.select is not None:
        names = yield from permissions.selection_findings(app.select)
    for name in names:
        stream = yield from permissions.stream_findings(
            app.kinesis, name, multi_stream=multi_stream
        )
        if stream is not None:
            readable.append(stream)
    return readable


def _recorded_streams(app: Target) -> Iterator[Finding]:
    """Check streams that other workers have recorded, because every worker reads every lease."""
    own, multi_stream = app.settings.streams, app.settings.is_multi_stream
    record = app.tables.coordinator.read_application() if multi_stream else None
    recorded = () if record is None else record.identity.streams
    for name in streams_to_read(own, recorded, is_multi_stream=multi_stream)[len(own) :]:
        yield from permissions.stream_findings(app.kinesis, name, multi_stream=multi_stream)


def _rows(app: Target, streams: list[StreamId], watch_seconds: float) -> Iterator[Finding]:
    """Check the rows: version, streams, and what two looks at the application show."""

    def look() -> Snapshot:
        return read_snapshot(app.tables, app.settings, app.clock, app.kinesis)

    try:
        snapshot = look_twice(look, app.clock, watch_seconds) if watch_seconds else look()
        yield check_client_version(app.tables.coordinator, snapshot)
        recorded = check_application(app.tables.coordinator, app.settings, streams)
        yield recorded
        if recorded.level is not FindingLevel.PROBLEM:
            yield from _recorded_streams(app)
    except KclError as error:
        advice = "try again; if it fails again, check the permissions above and the network"
        yield problem("rows", str(error), advice)
        return
    for finding in findings_of(snapshot, CheckLimits()):
        # The dead-letter table has its own check.
        if finding.check is not CheckName.DEAD_LETTERS or finding.is_fault:
            yield finding
