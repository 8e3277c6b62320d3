"""Refresh and show the page until the user quits."""

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.failures import sentence
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, target
from kcl_pipeline.cli.top.keys import Keyboard, Sort, ViewState
from kcl_pipeline.cli.top.snapshot import OwnerChanges, Snapshot, read_snapshot
from kcl_pipeline.clock import StopSignal
from kcl_pipeline.signals import STOP_SIGNALS, stop_on_signals

KEY_SECONDS: Final = 0.2
"""Longest time until a signal, a new snapshot or a new size of the terminal has an effect."""


def top(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    interval_seconds: Annotated[
        float,
        typer.Option("--interval-seconds", min=0.5, help="Seconds between two refreshes."),
    ] = 2.0,
    sort: Annotated[
        Sort, typer.Option("--sort", help="Order of the rows at the start.")
    ] = Sort.LAG,
    filter_text: Annotated[
        str,
        typer.Option("--filter", help="Show only rows that contain this text.", show_default=False),
    ] = "",
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="Print one page and end. Always on if the output is no terminal."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show workers, leases, lag and moves, and refresh them until q is pressed.

    Keys: l, w, s and k sort by lag, worker, shard and KiB/s; / filters by text; q quits. Moves are
    those since the start of the command. With --json it prints one snapshot.
    """
    app = target(application, stream, pipeline)
    # Loaded here: --help does not need them.
    from kcl_pipeline.cli.top.view import render  # noqa: PLC0415

    moves = OwnerChanges()
    # An error of the first read ends the command with a sentence.
    first = read_snapshot(app, moves)
    state = ViewState(sort, filter_text)
    if as_json:
        show.print_json(asdict(first))
        return
    if once or not sys.stdout.isatty():
        show.console().print(render(first, state))
        return
    stop = app.clock.signal()
    refresher = Refresher(lambda: read_snapshot(app, moves), first, interval_seconds, stop)
    # the terminal is restored, also when its window is closed
    with stop_on_signals(stop, (*STOP_SIGNALS, signal.SIGHUP)):
        threading.Thread(target=refresher.run, name="refresh", daemon=True).start()
        try:
            _show(refresher, state, stop)
        finally:
            stop.set()


class Refresher:
    """Reads snapshots on a thread of its own, so that keys never wait for AWS.

    Args:
        read: Reads a snapshot.
        first: The first one.
        interval_seconds: Time between two reads.
        stop: Ends the thread.
    """

    def __init__(
        self,
        read: Callable[[], Snapshot],
        first: Snapshot,
        interval_seconds: float,
        stop: StopSignal,
    ) -> None:
        self._read = read
        self._interval_seconds = interval_seconds
        self._stop = stop
        self._latest: tuple[Snapshot, str | None] = (first, None)
        self._defect: BaseException | None = None

    def run(self) -> None:
        """Read until the stop. An expected error is shown, and the next read is tried."""
        while not self._stop.wait(self._interval_seconds):
            try:
                self._latest = (self._read(), None)
            except Exception as error:  # noqa: BLE001 (`latest` raises a defect again)
                text = sentence(error)
                if text is None:
                    self._defect = error
                    return
                self._latest = (self._latest[0], text)

    @property
    def latest(self) -> tuple[Snapshot, str | None]:
        """The newest snapshot, and why the last read failed. Raises a defect of the reads."""
        if self._defect is not None:
            raise self._defect
        return self._latest


def _show(refresher: Refresher, state: ViewState, stop: StopSignal) -> None:
    """Draw the page when something changed, until the user quits."""
    from rich.live import Live  # noqa: PLC0415 (as above)

    from kcl_pipeline.cli.top.view import render  # noqa: PLC0415 (as above)

    console = show.console()
    with ExitStack() as terminal:
        # The keyboard is restored last, when nothing is drawn any more.
        has_keys = sys.stdin is not None and sys.stdin.isatty()
        keyboard = terminal.enter_context(Keyboard(sys.stdin.fileno())) if has_keys else None
        live = terminal.enter_context(Live(console=console, screen=True, auto_refresh=False))
        drawn: Any = None
        while not (stop.is_set() or state.is_done):
            snapshot, problem = refresher.latest
            page = (snapshot, problem, state, console.size)
            if page != drawn:
                height = console.size.height
                live.update(render(snapshot, state, height=height, problem=problem), refresh=True)
                drawn = page
            if keyboard is None:
                stop.wait(KEY_SECONDS)
                continue
            keys = keyboard.read(KEY_SECONDS)
            if keys is None:
                return
            for key in keys:
                state = state.after(key)
