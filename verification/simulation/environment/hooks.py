"""Hooks that make each call of an in-memory table a simulated I/O call."""

from __future__ import annotations

from collections.abc import Callable

from verification.simulation.environment.calls import Calls


def _nothing(_operation: str, _key: str) -> None:
    """Do nothing after a write."""


def before_hook(
    calls: Calls, table: str, applied: Callable[[str, str], None] = _nothing
) -> Callable[[str, str], None]:
    """Return a hook that begins each call; `applied` runs if the call is applied late."""

    def hook(operation: str, key: str) -> None:
        if operation != "DescribeTable":
            calls.before(f"{table}.{operation}", lambda: applied(operation, key))

    return hook


def after_hook(calls: Calls, table: str) -> Callable[[str, str], None]:
    def hook(operation: str, _key: str) -> None:
        if operation != "DescribeTable":
            calls.after(f"{table}.{operation}")

    return hook
