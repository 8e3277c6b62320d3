"""Check the dead-letter table: its records, its growth, and whether it can be read."""

from collections.abc import Iterator, Mapping

from kcl_pipeline.cli.doctor.finding import ok, problem, warning
from kcl_pipeline.clock import Clock
from kcl_pipeline.delta.dead_letters.replayed import count_dead_letters
from kcl_pipeline.errors import KclError
from kcl_pipeline.status.findings import Finding

_SUBJECT = "dead letters"
_ADVICE = (
    "read their errors in the table, correct the transform, and replay them with "
    "`kcl-pipeline do replay --dead-letters --in-place`, see docs/dead-letters.md"
)


def check_dead_letters(uri: str, options: Mapping[str, str], clock: Clock) -> Iterator[Finding]:
    """Check one dead-letter table.

    The growth is that of the last hour, by the workers' clocks.
    """
    try:
        counts = count_dead_letters(uri, options, clock.wall())
    except KclError as error:
        yield problem(
            _SUBJECT,
            f"the table cannot be read: {error}",
            "check the address, the storage options and the permissions; shards with failing "
            "records pause while the table cannot be written",
        )
        return
    if counts is None:
        yield ok(_SUBJECT, f"none: there is no table at {uri} yet")
        return
    text = (
        f"{counts.total:,} records in {uri}, {counts.waiting:,} not replayed; it grew by "
        f"{counts.recent:,} in the last hour"
    )
    if counts.waiting:
        yield warning(_SUBJECT, text, _ADVICE)
    else:
        yield ok(_SUBJECT, text)


def dead_letter_table(pipeline: object) -> tuple[str, Mapping[str, str]] | None:
    """The address and storage options of a pipeline's dead-letter table; None without one."""
    from kcl_pipeline.batch import dead_letter_address  # noqa: PLC0415 (it needs pyarrow)

    sink = getattr(pipeline, "sink", None)
    address = dead_letter_address(sink)
    if address is None:
        return None
    return address, dict(getattr(sink, "storage_options", None) or {})
