"""Run the checks of `kcl-pipeline doctor`, cheapest first."""

import os
from collections.abc import Generator, Iterator
from typing import Any

from kcl_pipeline.cli.doctor import setup
from kcl_pipeline.cli.doctor.dagster_instance import check_instance
from kcl_pipeline.cli.doctor.records import check_application, check_client_version, check_layout
from kcl_pipeline.cli.doctor.setup import check_metrics, ok, problem, unknown
from kcl_pipeline.cli.target import Target
from kcl_pipeline.errors import AwsError, KclError, SettingsError
from kcl_pipeline.leases.application import streams_to_read
from kcl_pipeline.planning import strategies
from kcl_pipeline.settings_errors import without_credentials
from kcl_pipeline.shards import StreamId
from kcl_pipeline.status.findings import CheckName, Finding, FindingLevel, findings_of
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.status.snapshot import Snapshot, look_twice, read_snapshot


def run_checks(app: Target, *, needs_java: bool, watch_seconds: float) -> Iterator[Finding]:
    """Run all checks, cheapest first. Checks that depend on a failed one are skipped."""
    yield from _settings(app)
    yield setup.check_java(needed=needs_java)
    credentials = _credentials(app)
    yield credentials
    if credentials.level is FindingLevel.PROBLEM:
        yield unknown("AWS", "tables and streams were not checked: there are no credentials")
    else:
        yield from _aws(app, watch_seconds)
    if app.pipeline is not None:
        yield from _pipeline(app, app.pipeline)


def _aws(app: Target, watch_seconds: float) -> Iterator[Finding]:
    are_there = yield from _tables(app)
    streams = yield from _streams(app)
    yield from check_metrics(app.settings, app.clients)
    # One look is enough to say that tables are missing
    yield from _rows(app, streams, watch_seconds if are_there else 0.0)


def _pipeline(app: Target, pipeline: Any) -> Iterator[Finding]:
    """Check the tables of the sink, and the Dagster instance that runs the workers."""
    from kcl_pipeline.cli.doctor import sink  # noqa: PLC0415 (Delta)

    yield from sink.check_output(pipeline.sink, pipeline.name)
    table = sink.dead_letter_table(pipeline)
    if table is not None:
        yield from sink.check_dead_letters(*table, app.clock)
    yield check_instance(os.environ.get("DAGSTER_HOME"), pipeline.workers)


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
    """Check the tables and the permissions on them. Returns whether there are all tables."""
    client, layout = app.clients.dynamodb, app.tables.layout
    try:
        tables = layout.tables()
    except KclError:  # the checks of the tables find the reason
        tables = layout.three_tables()
    are_there = True
    for use in tables:
        table, key_name = use.name, use.key_name
        finding, exists = setup.check_table(client, table, key_name, has_index=use.has_leases)
        yield finding
        are_there = are_there and exists
        if not exists:
            continue
        probes = setup.table_probes(client, table, key_name, setup.actions_on(use))
        found = list(setup.probe_all(f"table {table}", probes))
        yield from found
        if use.has_leases and all(one.level is FindingLevel.OK for one in found):
            yield check_layout(layout, table)
    return are_there


def _streams(app: Target) -> Generator[Finding, None, list[StreamId]]:
    """Check the permissions on the streams. Returns the streams that can be read."""
    readable: list[StreamId] = []
    multi_stream = app.settings.is_multi_stream
    names = app.settings.streams
    if app.select is not None:
        names = yield from setup.selection_findings(app.select)
    for name in names:
        stream = yield from setup.stream_findings(app.kinesis, name, multi_stream=multi_stream)
        if stream is not None:
            readable.append(stream)
    return readable


def _recorded_streams(app: Target) -> Iterator[Finding]:
    """Check streams that other workers have recorded, because every worker reads every lease."""
    own, multi_stream = app.settings.streams, app.settings.is_multi_stream
    record = app.tables.coordinator.read_application() if multi_stream else None
    recorded = () if record is None else record.identity.streams
    for name in streams_to_read(own, recorded, is_multi_stream=multi_stream)[len(own) :]:
        yield from setup.stream_findings(app.kinesis, name, multi_stream=multi_stream)


def _rows(app: Target, streams: list[StreamId], watch_seconds: float) -> Iterator[Finding]:
    """Check the rows: version, streams, and what two looks at the application show."""

    def look() -> Snapshot:
        return read_snapshot(app.tables, app.settings, app.clock, app.kinesis)

    advice = "try again; if it fails again, check the permissions above and the network"
    try:
        snapshot = look_twice(look, app.clock, watch_seconds) if watch_seconds else look()
    except KclError as error:
        yield problem("rows", str(error), advice)
        return
    table = app.tables.coordinator
    try:
        yield check_client_version(table, snapshot)
        recorded = check_application(table, app.settings, streams)
        yield recorded
        if recorded.level is not FindingLevel.PROBLEM:
            yield from _recorded_streams(app)
    except AwsError:
        pass  # a finding of the snapshot says what cannot be read
    except KclError as error:
        yield problem("rows", str(error), advice)
    for finding in findings_of(snapshot, CheckLimits()):
        # The dead-letter table has its own check.
        if finding.check is not CheckName.DEAD_LETTERS or finding.is_fault:
            yield finding
