"""Print tables, JSON and formatted numbers.

The values come from rows that others may have written. No string is interpreted as markup, and
non-printable characters are escaped, so that a value cannot move the cursor, change the title of
the terminal or start a new line.
"""

import io
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kcl_pipeline.leases.row import BadRow
from kcl_pipeline.text import printable

WIDTH_WITHOUT_TERMINAL: Final = 200
MAX_CELL_CHARACTERS: Final = 2_100
"""A lease key or an owner of 2,048 bytes fits."""
MAX_LINE_CHARACTERS: Final = 10_000
MAX_BAD_ROWS: Final = 20
NONE: Final = "-"


def console() -> Console:
    """The console for results. Without a terminal, lines are wide enough for lease keys."""
    out = Console(highlight=False, markup=False, emoji=False)
    if out.is_terminal:
        return out
    return Console(highlight=False, markup=False, emoji=False, width=WIDTH_WITHOUT_TERMINAL)


def plain(text: str, style: str = "") -> Text:
    """A string without markup, with non-printable characters escaped."""
    return Text(printable(text, MAX_CELL_CHARACTERS), style=style)


def echo(text: str, *, err: bool = False) -> None:
    """Print one line to standard output, or to standard error."""
    typer.echo(printable(text, MAX_LINE_CHARACTERS), err=err)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
) -> None:
    """Print a table, or "(none)" without rows. Columns in `numbers` are right-aligned."""
    console().print(table(title, columns, rows, numbers=numbers))


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
) -> RenderableType:
    """A table, or "(none)" without rows. Columns in `numbers` are right-aligned."""
    found = Table(
        title=plain(title), title_justify="left", box=None, pad_edge=False, header_style="bold"
    )
    for name in columns:
        found.add_column(
            plain(name), justify="right" if name in numbers else "left", overflow="fold"
        )
    for row in rows:
        found.add_row(*(plain(cell) for cell in row))
    return found if found.row_count else Group(found, "(none)")


def escape_what_cannot_be_encoded() -> None:
    """Let no character end a command on a terminal that is not UTF-8, as with `LANG=C`.

    Names of streams and workers, and our own sentences, have characters that ASCII does not have.
    They are shown as escapes.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _is_utf8(stream):
            stream.reconfigure(errors="backslashreplace")


def _is_utf8(stream: Any) -> bool:
    return (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"


def print_json(value: Any) -> None:
    """Print indented JSON. Non-printable characters are escaped as in JSON.

    So are all that are not ASCII, if standard output is not UTF-8.
    """
    text = json.dumps(value, indent=2, ensure_ascii=not _is_utf8(sys.stdout))
    if not text.replace("\n", "").isprintable():
        text = "".join(c if c == "\n" or c.isprintable() else json.dumps(c)[1:-1] for c in text)
    typer.echo(text)


def print_json_line(value: Any) -> None:
    """Print JSON in one line, as the last line of a command that prints other lines before."""
    text = json.dumps(value, ensure_ascii=True)
    typer.echo(text)


def print_bad_rows(rows: Sequence[BadRow]) -> None:
    """Print the rows that cannot be parsed to standard error."""
    for row in sorted(rows, key=lambda row: (row.table, row.key))[:MAX_BAD_ROWS]:
        echo(f"table {row.table}: {row.reason}", err=True)
    if len(rows) > MAX_BAD_ROWS:
        echo(f"and {len(rows) - MAX_BAD_ROWS} more rows that cannot be parsed", err=True)


def number(value: float | None, decimals: int = 1) -> str:
    """A number with fixed decimals; a dash for None."""
    return NONE if value is None else f"{value:,.{decimals}f}"


def age(seconds: float) -> str:
    """A duration in its two largest units, for example "2 h 5 min"."""
    rest = int(max(seconds, 0))
    parts: list[str] = []
    for name, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        amount, rest = divmod(rest, length)
        if amount or (name == "s" and not parts):
            parts.append(f"{amount} {name}")
    return " ".join(parts[:2])
