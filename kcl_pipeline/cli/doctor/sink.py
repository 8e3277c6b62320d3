"""Check the output table and the dead-letter table of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kcl_pipeline.batch import dead_letter_address
from kcl_pipeline.cli.doctor.setup import ok, problem, warning
from kcl_pipeline.clock import Clock
from kcl_pipeline.delta.dead_letters import count_dead_letters
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.sink import DeltaCommitter
from kcl_pipeline.errors import KclError, TableMismatchError
from kcl_pipeline.status.findings import Finding

_OUTPUT = "output table"


def check_output(sink: Any, application_name: str) -> Iterator[Finding]:
    """Check what a worker checks before it starts. A sink that is no table gives no finding.

    In an object store, this writes one small object twice, and deletes it.
    """
    if not isinstance(sink, DeltaSink):
        return
    try:
        version = DeltaCommitter(sink, application_name).check()
    except TableMismatchError as error:
        yield problem(_OUTPUT, str(error), "no worker starts until this is corrected")
    except KclError as error:
        yield problem(
            _OUTPUT,
            str(error),
            "check the address, the storage options, the credentials and the permissions of the "
            "store, see docs/iam.md",
        )
    else:
        text = "does not exist yet: the first batch creates it"
        if version is not None:
            text = f"version {version} can be written"
        yield ok(_OUTPUT, f"{sink.uri}: {text}")


_LETTERS = "dead letters"
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
            _LETTERS,
            f"the table cannot be read: {error}",
            "check the address, the storage options and the permissions; shards with failing "
            "records pause while the table cannot be written",
        )
        return
    if counts is None:
        yield ok(_LETTERS, f"none: there is no table at {uri} yet")
        return
    text = (
        f"{counts.total:,} records in {uri}, {counts.waiting:,} not replayed; it grew by "
        f"{counts.recent:,} in the last hour"
    )
    if counts.waiting:
        yield warning(_LETTERS, text, _ADVICE)
    else:
        yield ok(_LETTERS, text)


def dead_letter_table(pipeline: object) -> tuple[str, Mapping[str, str]] | None:
    """The address and storage options of a pipeline's dead-letter table; None without one."""
    sink = getattr(pipeline, "sink", None)
    address = dead_letter_address(sink)
    if address is None:
        return None
    return address, dict(getattr(sink, "storage_options", None) or {})
