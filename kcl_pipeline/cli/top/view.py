"""Draw a snapshot: a pure function of the snapshot and of what the user has chosen."""

import re
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kcl_pipeline.cli import show
from kcl_pipeline.cli.inspection.leases import NO_OWNER
from kcl_pipeline.cli.top.keys import Sort, ViewState
from kcl_pipeline.cli.top.snapshot import LeaseRow, OwnerChange, Snapshot, WorkerRow
from kcl_pipeline.text import counted

WORKER_COLUMNS: Final = ("worker", "leases", "KiB/s", "CPU %", "lag", "report", "state")
LEASE_COLUMNS: Final = ("lease", "worker", "state", "lag", "KiB/s", "checkpoint")
MOVE_COLUMNS: Final = ("seen", "lease", "from", "to", "outcome")
_NUMBERS: Final = frozenset({"leases", "KiB/s", "CPU %", "lag"})
_NAMES: Final = frozenset({"worker", "lease", "from", "to"})
_FRAME_LINES: Final = 3
"""Title, column names and "more" of a table."""
_MAX_MOVES: Final = 5
_KEYS: Final = "q quit, / filter, sort: l lag, w worker, s shard, k KiB/s"
_SHORT: Final = 28
"""Largest length of a name on a page that is cut to the terminal."""
_KEY: Final = re.compile(r"(?:[0-9]+:([^:]+):[0-9]+:)?shardId-0*([0-9]+)")


def render(
    snapshot: Snapshot, state: ViewState, *, height: int | None = None, problem: str | None = None
) -> RenderableType:
    """Draw the page.

    Args:
        snapshot: What was read.
        state: Sort order and filter.
        height: Lines of the terminal. None: all rows, and no line with the keys.
        problem: Why the last refresh failed. None: it did not.
    """
    workers = sorted_workers(snapshot.workers, state)
    leases = sorted_leases(snapshot.leases, state)
    moves = [move for move in snapshot.moves if _has(state.filter, *_move_cells(move))]
    head = _head(snapshot, problem)
    at_most = _row_limits(height, len(head), len(workers), len(moves))
    is_cut = height is not None
    columns = LEASE_COLUMNS[:-1] if is_cut else LEASE_COLUMNS  # a checkpoint is too long
    body = [
        _table("Workers", WORKER_COLUMNS, map(_worker_cells, workers), at_most[0], is_cut=is_cut),
        _table("Leases", columns, map(_lease_cells, leases), at_most[1], is_cut=is_cut),
        _table("Moves", MOVE_COLUMNS, map(_move_cells, moves), at_most[2], is_cut=is_cut),
    ]
    foot = [_line(_foot(state), style="dim")] if is_cut else []
    return Group(*head, *body, *foot)


def _row_limits(
    height: int | None, head: int, workers: int, moves: int
) -> tuple[int | None, int | None, int | None]:
    """The numbers of rows of the three tables. The leases have what the others leave."""
    if height is None:
        return None, None, None
    free = max(height - head - 1 - 3 * _FRAME_LINES, 3)
    for_moves = min(max(moves, 1), _MAX_MOVES, free // 4 or 1)
    for_workers = min(max(workers, 1), free // 3 or 1)
    return for_workers, max(free - for_moves - for_workers, 1), for_moves


def sorted_workers(rows: Iterable[WorkerRow], state: ViewState) -> list[WorkerRow]:
    """The workers that the filter passes, in their order."""
    keys: dict[Sort, Callable[[WorkerRow], tuple[float, str]]] = {
        Sort.LAG: lambda row: (-_known(row.lag_millis), row.worker_id),
        Sort.RATE: lambda row: (-row.throughput_kbps, row.worker_id),
    }
    found = [row for row in rows if _has(state.filter, row.worker_id, *row.states)]
    return sorted(found, key=keys.get(state.sort, lambda row: (0.0, row.worker_id)))


def sorted_leases(rows: Iterable[LeaseRow], state: ViewState) -> list[LeaseRow]:
    """The leases that the filter passes, in their order.

    By lag, leases without an owner come first, and those with an unknown lag last.
    """
    keys: dict[Sort, Callable[[LeaseRow], tuple[bool, float, str, str]]] = {
        Sort.LAG: lambda row: (row.owner is not None, -_known(row.lag_millis), "", row.lease_key),
        Sort.WORKER: lambda row: (row.owner is not None, 0.0, row.owner or "", row.lease_key),
        Sort.SHARD: lambda row: (False, 0.0, "", row.lease_key),
        Sort.RATE: lambda row: (False, -_known(row.throughput_kbps), "", row.lease_key),
    }
    found = [row for row in rows if _has(state.filter, *_lease_names(row))]
    return sorted(found, key=keys[state.sort])


def _lease_names(row: LeaseRow) -> tuple[str, ...]:
    return row.lease_key, shortened(row.lease_key), row.owner or "", row.state


def _known(value: float | None) -> float:
    return -1.0 if value is None else value


def _has(text: str, *cells: str) -> bool:
    wanted = text.casefold()
    return any(wanted in cell.casefold() for cell in cells)


def _head(snapshot: Snapshot, problem: str | None) -> list[Text]:
    leases = snapshot.leases
    rate = sum(lease.throughput_kbps or 0.0 for lease in leases)
    lags = [lease.lag_millis for lease in leases if lease.lag_millis is not None]
    parts = [
        f"{snapshot.application} at {datetime.fromtimestamp(snapshot.at, UTC):%H:%M:%S} UTC",
        counted(len(snapshot.workers), "worker"),
        f"{counted(len(leases), 'lease')} and {snapshot.ended} ended",
        f"{sum(lease.owner is None for lease in leases)} without an owner",
    ]
    load = f"{rate:,.1f} KiB/s, largest lag {_lag(max(lags, default=None))}"
    lines = [_line(", ".join(parts), style="bold"), _line(f"{load}; {snapshot.leader}")]
    if snapshot.pause is not None:
        lines.append(_line(snapshot.pause, style="yellow"))
    if snapshot.bad_rows:
        text = f"{counted(snapshot.bad_rows, 'row')} cannot be parsed; `kcl-pipeline leases` and "
        lines.append(_line(f"{text}`workers` name them", style="yellow"))
    if problem is not None:
        lines.append(_line(f"not refreshed: {problem}", style="red"))
    return lines


def _foot(state: ViewState) -> str:
    if state.is_typing:
        return f"filter: {state.filter}_  (Enter: done, Esc: no filter)"
    shown = f"  filter: {state.filter}" if state.filter else ""
    return f"sorted by {state.sort}{shown} | {_KEYS}"


def _line(text: str, style: str = "") -> Text:
    line = show.plain(text, style)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    at_most: int | None,
    *,
    is_cut: bool,
) -> RenderableType:
    cells = list(rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        # In a narrow terminal the names get shorter, and the numbers stay.
        table.add_column(
            show.plain(name),
            justify="right" if name in _NUMBERS else "left",
            overflow="ellipsis" if is_cut else "fold",
            no_wrap=is_cut and name in _NUMBERS,
        )
    for row in cells[:at_most]:
        named = zip(columns, row, strict=False)
        table.add_row(*(_cell(name, text, is_cut=is_cut) for name, text in named))
    more = len(cells) - table.row_count
    heading = f"{title}: {len(cells)}"
    return Group(
        _line(heading, style="bold underline"),
        table if cells else _line("(none)"),
        *([_line(f"and {more} more", style="dim")] if more else []),
    )


def _cell(column: str, text: str, *, is_cut: bool) -> Text:
    if not is_cut:
        return show.plain(text)
    return _line(shortened(text) if column in _NAMES else text)


def shortened(text: str) -> str:
    """A key without leading zeros, account and epoch; another long name without its middle."""
    key = _KEY.fullmatch(text)
    if key is not None:
        text = f"shardId-{key[2]}" if key[1] is None else f"{key[1]}:shardId-{key[2]}"
    if len(text) <= _SHORT:
        return text
    return f"{text[: _SHORT // 2 - 1]}…{text[-_SHORT // 2 :]}"


def _lag(millis: int | None, *, is_upper_bound: bool = False) -> str:
    if millis is None:
        return "unknown"
    return f"{'<= ' if is_upper_bound else ''}{millis / 1000:,.1f} s"


def _worker_cells(row: WorkerRow) -> tuple[str, ...]:
    return (
        row.worker_id,
        str(row.leases),
        show.number(row.throughput_kbps),
        show.number(row.cpu_percent),
        _lag(row.lag_millis),
        f"{show.age(row.seconds_since_report)} ago",
        ", ".join(row.states) or "working",
    )


def _lease_cells(row: LeaseRow) -> tuple[str, ...]:
    lag = _lag(row.lag_millis, is_upper_bound=row.lag_is_upper_bound)
    return (
        row.lease_key,
        row.owner or NO_OWNER,
        row.state,
        show.NONE if row.owner is None else lag,
        show.number(row.throughput_kbps),
        row.checkpoint,
    )


def _move_cells(row: OwnerChange) -> tuple[str, ...]:
    return (
        f"{datetime.fromtimestamp(row.at, UTC):%H:%M:%S}",
        row.lease_key,
        row.from_worker or NO_OWNER,
        row.to_worker or NO_OWNER,
        row.outcome,
    )
