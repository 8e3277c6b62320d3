"""Turn the findings of a snapshot into the asset checks of a pipeline.

An executed check takes a snapshot of its own, with two looks. The leader sensor evaluates what it
has observed. Both use the same findings.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import dagster as dg

from kcl_pipeline.aws import open_kinesis
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.orchestration.names import Names, PipelineResources
from kcl_pipeline.orchestration.options import DagsterOptions, PipelineLike
from kcl_pipeline.orchestration.runs import (
    active_runs,
    last_drain,
    observe_run_problems,
    starting_workers,
    table_of,
)
from kcl_pipeline.orchestration.specs import code_version
from kcl_pipeline.status.findings import CheckName, Finding, FindingLevel, findings_of
from kcl_pipeline.status.snapshot import Snapshot, look_twice, read_snapshot
from kcl_pipeline.text import duration_text

OF_OUTPUT: Final = frozenset({CheckName.LAG, CheckName.RETENTION, CheckName.DEAD_LETTERS})
"""The checks of the output. The others belong to the fleet."""
HOUR_SECONDS: Final = 3_600.0
_MAX_EVENTS: Final = 1_000


@dataclass(frozen=True, slots=True)
class CheckVerdict:
    """The result of one check.

    Attributes:
        check: The check.
        passed: Whether it has no fault.
        is_known: Whether anything could be judged.
        severity: ERROR if one of its findings is a problem.
        description: Every fault with its advice, or why it passes.
        faults: The names of its faults.
        metadata: Numbers, and the shards or workers that it is about.
    """

    check: CheckName
    passed: bool
    is_known: bool
    severity: dg.AssetCheckSeverity
    description: str
    faults: tuple[str, ...] = ()
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def content(self) -> tuple[bool, dg.AssetCheckSeverity, tuple[str, ...]]:
        """What is reported at once when it changes: the faults, or what the fleet's check says.

        What the output's checks say has a number that changes all the time.
        """
        is_steady = self.passed and self.check not in OF_OUTPUT
        return self.passed, self.severity, (self.description,) if is_steady else self.faults

    def evaluation(self, key: dg.AssetKey) -> dg.AssetCheckEvaluation:
        """The result as an event without a run."""
        return dg.AssetCheckEvaluation(
            asset_key=key,
            check_name=self.check.value,
            passed=self.passed,
            severity=self.severity,
            description=self.description,
            metadata=self.metadata,
        )

    def result(self, key: dg.AssetKey) -> dg.AssetCheckResult:
        """The result as an executed check returns it. What is not known does not pass."""
        return dg.AssetCheckResult(
            asset_key=key,
            check_name=self.check.value,
            passed=self.passed and self.is_known,
            severity=self.severity,
            description=self.description,
            metadata=self.metadata,
        )


def verdicts(findings: Sequence[Finding]) -> list[CheckVerdict]:
    """One verdict for each check that has a finding."""
    return [
        _verdict(check, group)
        for check in CheckName
        if (group := [one for one in findings if one.check is check])
    ]


def _verdict(check: CheckName, findings: Sequence[Finding]) -> CheckVerdict:
    faults = [one for one in findings if one.is_fault]
    is_error = any(one.level is FindingLevel.PROBLEM for one in faults)
    metadata: dict[str, Any] = {}
    for one in findings:
        metadata |= one.numbers
        if one.rows:
            metadata[one.name] = table_of([dict(row) for row in one.rows])
    return CheckVerdict(
        check,
        not faults,
        any(one.level is not FindingLevel.UNKNOWN for one in findings),
        dg.AssetCheckSeverity.ERROR if is_error else dg.AssetCheckSeverity.WARN,
        "\n\n".join(map(_text, findings)),
        tuple(one.name for one in faults),
        metadata,
    )


def last_checks(
    instance: dg.DagsterInstance, output: dg.AssetKey, checks: Iterable[CheckName] = OF_OUTPUT
) -> Iterator[dg.AssetCheckEvaluation]:
    """The checks of the output as they were last judged, to be reported with a materialization.

    The Dagster UI shows an evaluation if it has the run of the latest materialization, or neither
    has one. Every worker's end is in a run of its own.
    """
    for check in sorted(checks):
        key = dg.AssetCheckKey(output, check.value)
        record = instance.get_latest_asset_check_evaluation_record(key)
        if record is None or record.event is None or record.event.dagster_event is None:
            continue
        judged = record.event.dagster_event.event_specific_data
        if not isinstance(judged, dg.AssetCheckEvaluation):  # A run has planned it.
            continue
        yield dg.AssetCheckEvaluation(
            asset_key=output,
            check_name=check.value,
            passed=judged.passed,
            severity=judged.severity,
            description=judged.description,
            metadata=judged.metadata,
        )


def _text(finding: Finding) -> str:
    advice = finding.advice
    return finding.sentence + (f". {advice[:1].upper()}{advice[1:]}" if advice else "")


def asset_of(check: CheckName, names: Names) -> dg.AssetKey:
    """The asset that a check belongs to."""
    return names.output if check in OF_OUTPUT else names.fleet


def build_checks(
    pipeline: PipelineLike, names: Names, options: DagsterOptions, clock: Clock | None = None
) -> dg.AssetChecksDefinition:
    """Build the checks of a pipeline. One execution evaluates one snapshot for those selected."""
    texts = _descriptions(options)

    @dg.multi_asset_check(
        name=f"{names.prefix}_checks",
        specs=[
            dg.AssetCheckSpec(check.value, asset=asset_of(check, names), description=texts[check])
            for check in CheckName
        ],
        can_subset=True,
        required_resource_keys={
            names.aws,
            names.leases_resource,
            names.workers_resource,
            names.coordinator_resource,
        },
    )
    def execute(context: dg.AssetCheckExecutionContext) -> Iterator[dg.AssetCheckResult]:
        snapshot = observed_snapshot(
            pipeline,
            names,
            PipelineResources(names, context),
            context.instance,
            clock or SystemClock(),
        )
        findings = findings_of(snapshot, options.check_limits, options.lag_threshold_seconds)
        selected = {key.name for key in context.selected_asset_check_keys}
        for verdict in verdicts(findings):
            if verdict.check.value in selected:
                yield verdict.result(asset_of(verdict.check, names))

    return execute


def _descriptions(options: DagsterOptions) -> dict[CheckName, str]:
    limits = options.check_limits
    return {
        CheckName.LAG: "Every record that arrived more than "
        f"{duration_text(options.lag_threshold_seconds)} ago is in the table. The severity is "
        f"ERROR above {duration_text(limits.lag_error_seconds)}.",
        CheckName.MOVING: "Every shard is read: a worker renews its lease, it is not paused, and "
        "it makes progress while records wait.",
        CheckName.RETENTION: "No unread record leaves the retention period of its stream within "
        f"{duration_text(limits.retention_warn_seconds)}. The severity is ERROR below "
        f"{duration_text(limits.retention_error_seconds)}.",
        CheckName.LOSSES: "No records were lost and no table was restored, or somebody has "
        "acknowledged it.",
        CheckName.DEAD_LETTERS: f"At most {limits.dead_letters_per_hour} records became dead "
        "letters in the last hour.",
        CheckName.COVERED: "The leases of every stream cover all hash keys, every row can be "
        "parsed, and every stream can be described and listed.",
        CheckName.WORKERS: "Workers run: none is hung, the table takes their batches, and no run "
        "waits or keeps failing.",
        CheckName.LEADER: "A leader renews its lock. The sensor reports its absence after "
        f"{duration_text(limits.leader_absent_seconds)}.",
    }


def period_seconds(settings: ConsumerSettings) -> float:
    """The time between two looks in which everybody who lives writes its row."""
    millis = max(
        settings.lease.failover_time_millis,
        settings.worker.worker_metrics_reporter_freq_in_millis,
    )
    return 1.1 * millis / 1000


class _Tables:
    """The tables of a context with resources."""

    def __init__(self, resources: PipelineResources) -> None:
        self.lease = resources.leases
        self.workers = resources.workers
        self.coordinator = resources.coordinator


def observed_snapshot(
    pipeline: PipelineLike,
    names: Names,
    resources: PipelineResources,
    instance: dg.DagsterInstance,
    clock: Clock,
) -> Snapshot:
    """Look at the application twice, one period apart, and at the runs of its workers."""
    settings = pipeline.settings
    kinesis = open_kinesis(settings, resources.aws.clients(settings), clock)
    look: Callable[[], Snapshot] = lambda: read_snapshot(  # noqa: E731 (it is an argument)
        _Tables(resources), settings, clock, kinesis
    )
    snapshot = look_twice(look, clock, period_seconds(settings))
    living = {worker.worker_id for worker in snapshot.live}
    version, now = code_version(pipeline), clock.wall()
    return replace(
        snapshot,
        dead_letters=dead_letters_last_hour(instance, names.output, now),
        run_problems=observe_run_problems(pipeline, names, instance, living, version, now),
        starting=starting_workers(
            active_runs(instance, names.application, settings.worker.worker_group_separator),
            {worker.worker_id for worker in snapshot.workers},
            now,
        ),
        drained_at=last_drain(instance, names.application),
    )


def dead_letters_last_hour(
    instance: dg.DagsterInstance, key: dg.AssetKey, now: float
) -> int | None:
    """The records that became dead letters in the last hour. None: nothing was reported.

    The reports of the output are events of Dagster, so a reload of the code loses none.
    """
    since = dg.AssetRecordsFilter(key, after_timestamp=now - HOUR_SECONDS)
    records = [
        *instance.fetch_materializations(since, limit=_MAX_EVENTS).records,
        *instance.fetch_observations(since, limit=_MAX_EVENTS).records,
    ]
    events = [one.asset_materialization or one.asset_observation for one in records]
    counts = [number_in(one.metadata, "dead_letters") for one in events if one is not None]
    known = [count for count in counts if count is not None]
    return round(sum(known)) if known else None


def number_in(metadata: Mapping[str, Any], name: str) -> float | None:
    """A number in the metadata of an event. None: there is none."""
    found = metadata.get(name)
    value = getattr(found, "value", found)
    return float(value) if isinstance(value, int | float) else None
