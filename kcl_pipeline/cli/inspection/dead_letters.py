"""`kcl-pipeline dead-letters`: count dead letters, and mark them as replayed."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.target import AsJson, OnlyPipeline, Pipeline, load_pipeline
from kcl_pipeline.clock import SystemClock
from kcl_pipeline.errors import SettingsError

if TYPE_CHECKING:
    from kcl_pipeline.delta.dead_letters.replayed import DeadLetterCounts


def dead_letters(
    application: OnlyPipeline = None,
    pipeline: Pipeline = None,
    uri: Annotated[
        str | None,
        typer.Option(
            "--uri", help="Address of the table, instead of --pipeline.", show_default=False
        ),
    ] = None,
    mark_replayed: Annotated[
        bool,
        typer.Option(
            "--mark-replayed",
            help="Set replayed_at of the records that have none. Needs --failed-before.",
        ),
    ] = False,
    failed_before: Annotated[
        str | None,
        typer.Option(
            "--failed-before",
            help="Mark only records that failed before this time, such as 2026-01-31T12:00:00Z. "
            "Use the time at which you read the table: later records were not replayed.",
            show_default=False,
        ),
    ] = None,
    lease_key: Annotated[
        str | None,
        typer.Option("--lease-key", help="Mark only records of this lease.", show_default=False),
    ] = None,
    batch_id: Annotated[
        str | None,
        typer.Option("--batch-id", help="Mark only records of this batch.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Count the records of a dead-letter table, and mark records as replayed."""
    # Loaded here: other commands do not need the Delta library.
    from kcl_pipeline.delta.dead_letters import replayed  # noqa: PLC0415

    if application is not None:
        raise SettingsError(
            "--application names no dead-letter table; write --pipeline module:attribute, or "
            "--uri ADDRESS"
        )
    address, options = _table(pipeline, uri)
    now = SystemClock().wall()
    marked = None
    if mark_replayed:
        marked = replayed.mark_replayed(
            address,
            options,
            failed_before=_time(failed_before),
            replayed_at=datetime.fromtimestamp(now, UTC),
            lease_key=lease_key,
            batch_id=batch_id,
        )
    elif failed_before is not None or lease_key is not None or batch_id is not None:
        raise SettingsError(
            "--failed-before, --lease-key and --batch-id choose the records to mark; add "
            "--mark-replayed"
        )
    counts = replayed.count_dead_letters(address, options, now)
    found = replayed.DeadLetterCounts() if counts is None else counts
    _print(found, marked, as_json=as_json)


def _print(counts: DeadLetterCounts, marked: int | None, *, as_json: bool) -> None:
    if as_json:
        show.print_json(
            {
                "total": counts.total,
                "not_replayed": counts.waiting,
                "last_hour": counts.recent,
                "marked": marked,
            }
        )
        return
    if marked is not None:
        typer.echo(f"{marked:,} records marked as replayed")
    typer.echo(
        f"{counts.total:,} dead letters, {counts.waiting:,} not replayed, {counts.recent:,} in the "
        "last hour"
    )


def dead_letter_table(pipeline: object) -> tuple[str, Mapping[str, str]] | None:
    """The address and storage options of a pipeline's dead-letter table; None without one."""
    from kcl_pipeline.batch import dead_letter_address  # noqa: PLC0415 (it needs pyarrow)

    sink = getattr(pipeline, "sink", None)
    address = dead_letter_address(sink)
    if address is None:
        return None
    return address, dict(getattr(sink, "storage_options", None) or {})


def _table(pipeline: str | None, uri: str | None) -> tuple[str, Mapping[str, str]]:
    if (pipeline is None) == (uri is None):
        raise SettingsError("write either --pipeline module:attribute or --uri ADDRESS")
    if uri is not None:
        return uri, {}
    found = dead_letter_table(load_pipeline(str(pipeline)))
    if found is None:
        raise SettingsError(
            f"the sink of --pipeline {pipeline} has no dead-letter table; set its dead_letter_uri"
        )
    return found


def _time(text: str | None) -> datetime:
    if text is None:
        raise SettingsError(
            "--failed-before is missing; write the time at which you read the table, such as "
            "2026-01-31T12:00:00Z"
        )
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        found = None
    if found is None or found.tzinfo is None:
        raise SettingsError(
            f"--failed-before {text!r} is no time with a time zone; write it like "
            "2026-01-31T12:00:00Z"
        )
    return found
