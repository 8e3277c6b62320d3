"""How things are printed: one console, plain JSON, figures that people can read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

import typer
from rich.console import Console
from rich.table import Table

WIDTH_WITHOUT_TERMINAL: Final = 200
NONE: Final = "-"


def console() -> Console:
    """Where results go; without a terminal lines are long enough for lease keys."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[str] = ()) -> None:
    """A table; the columns named in `numbers` are right-aligned. An empty one says so."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    out = console()
    out.print(table)
    if not table.row_count:
        out.print("(none)")


def print_json(value: Any) -> None:
    """Indented JSON on standard output."""
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def number(value: float | None, decimals: int = 1) -> str:
    """A figure with fixed decimals, or a dash."""
    return NONE if value is None else f"{value:,.{decimals}f}"


def age(seconds: float) -> str:
    """A length of time in its two largest units, such as "2 h 5 min"."""
    rest = int(max(seconds, 0))
    parts: list[str] = []
    for name, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        amount, rest = divmod(rest, length)
        if amount or (name == "s" and not parts):
            parts.append(f"{amount} {name}")
    return " ".join(parts[:2])
