"""The exit codes of the command line. docs/commands.md has them in a table."""

from typing import Final

DONE: Final = 0
FAILED: Final = 1
"""Failed, refused, or a result that needs attention. The documents say which per command."""
WRONG_ARGUMENT: Final = 2
"""An unknown option or a value of another type. Typer sets it."""
HUNG: Final = 3
"""A worker that ended because it was hung."""
ID_TAKEN: Final = 4
"""A worker that ended because another process has started under its worker id."""
USELESS: Final = 5
"""A worker that could neither read, renew nor commit for `worker.useless_after_millis`."""
INTERRUPTED: Final = 130
"""Ctrl-C in a command that does not handle it. Typer sets it."""
