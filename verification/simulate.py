"""Run the fleet simulation over many seeds: `make simulate`, or `python -m verification.simulate`.

    make simulate                        the 2,000 fixed seeds
    make simulate COUNT=10000            10,000 seeds from a random one, which is printed
    make simulate SEEDS=17:19            these seeds (the end is exclusive)

The command prints a failing seed when it is found, then shrinks it and prints its timeline. The
last lines list all failing seeds. The exit code is 1 when an invariant is broken, and 130 when the
run is interrupted.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor
from concurrent.futures import wait as wait_for
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import active_children, get_context
from types import FrameType
from typing import Any, Final, TextIO

from kcl_pipeline.clock import SystemClock
from verification.processes import begin_process
from verification.simulation import Outcome, StormOptions, simulate
from verification.simulation.results import Failure, Result, report, result_of
from verification.simulation.seeds import FIXED, commit_seeds, random_seeds, seed_range, shown
from verification.simulation.shrink import shrink

SHRUNK_FAILURES: Final = 5
"""Number of failing seeds of one run that are shrunk; the others are only listed."""

PROGRESS_SECONDS: Final = 20.0
_AHEAD: Final = 2
"""Queued seeds per process; the number is small so that a failing seed is shrunk soon."""

_INTERRUPTED: Final = 130

Found = Callable[[Failure], None]
Progress = Callable[[Result], None]


def run_one(seed: int) -> Result:
    """Run one seed in this process; an error of the simulation itself counts as a failure."""
    try:
        return result_of(simulate(seed))
    except Exception as error:  # noqa: BLE001 (a seed must not end the run of the others)
        text = f"the simulation itself failed: {type(error).__name__}: {error}"
        return Result(seeds=1, failures=[Failure(seed, (text,))])
    finally:
        if not gc.isenabled():
            gc.collect()


def explained(failure: Failure) -> str:
    """Explain how to replay a failing seed, with its timeline after shrinking."""
    replay = f"replay: make simulate SEEDS={failure.seed}"
    try:
        options, outcome = shrink(failure.seed, StormOptions())
    except Exception as error:  # noqa: BLE001 (also what made the seed fail)
        return f"{replay}\nnot shrunk: {type(error).__name__}: {error}"
    called = f"simulate({failure.seed}, {options})"
    return f"{replay}\nshrunk: {called}\n{outcome.timeline()}"


class Run:
    """One run of many seeds; `result` covers the seeds so far."""

    def __init__(self, out: TextIO) -> None:
        self.result = Result()
        self._out = out
        self._clock = SystemClock()
        self._began = self._shown_at = self._clock.monotonic()

    def over(self, seeds: Iterator[int], workers: int) -> None:
        """Run these seeds in `workers` processes; with 1 they run in this process."""
        if workers > 1:
            self._in_processes(seeds, workers)
            return
        for seed in seeds:
            for failure in self._note(run_one(seed)):
                self._print(explained(failure))

    def _in_processes(self, seeds: Iterator[int], workers: int) -> None:
        # Forks of one process that has the imports, which take a second of processor time. This
        # process may have threads, so it is not forked.
        context = get_context("forkserver")
        context.set_forkserver_preload(["verification.simulation"])
        pool = ProcessPoolExecutor(workers, mp_context=context, initializer=begin_process)
        running: dict[Future[Result], int] = {}
        shrinking: list[Future[str]] = []
        try:
            while True:
                for seed in islice(seeds, max(_AHEAD * workers - len(running), 0)):
                    running[pool.submit(run_one, seed)] = seed
                if not running and not shrinking:
                    pool.shutdown()  # a pool that still ends can fail in the interpreter's exit
                    return
                waiting: list[Future[Any]] = [*running, *shrinking]
                done, _ = wait_for(waiting, return_when=FIRST_COMPLETED)
                for text in [future for future in shrinking if future in done]:
                    self._print(text.result())
                    shrinking.remove(text)
                for ended in [future for future in running if future in done]:
                    part = ended.result()
                    del running[ended]
                    shrinking += [pool.submit(explained, failure) for failure in self._note(part)]
        except BrokenProcessPool:
            died = ("a process died while this seed ran or waited for its turn",)
            lost = [Failure(seed, died) for seed in running.values()]
            self._note(Result(failures=lost))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _note(self, part: Result) -> list[Failure]:
        """Add a seed's result; return the failures that are to be shrunk."""
        unused = SHRUNK_FAILURES - len(self.result.failures)
        self.result.add(part)
        now = self._clock.monotonic()
        self.result.seconds = now - self._began
        for failure in part.failures:
            self._print(f"\n{failure}")
        if now - self._shown_at >= PROGRESS_SECONDS:
            self._shown_at = now
            result = self.result
            self._print(
                f"{result.seeds} seeds, {result.seeds / result.seconds:.1f}/s, "
                f"{len(result.failures)} failed"
            )
        return part.failures[: max(unused, 0)]

    def _print(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def _first_failure(seeds: Iterator[int], out: TextIO) -> int:
    for seed in seeds:
        outcome: Outcome = simulate(seed)
        if outcome.violations:
            print(outcome.timeline(), file=out)
            print(Failure(seed, outcome.violations), file=out)
            return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m verification.simulate",
        description="Simulate fleets under faults; one seed decides everything.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--seeds",
        type=seed_range,
        help=f"first:end, end exclusive (default: the fixed ones, {shown(FIXED)})",
    )
    which.add_argument(
        "--ci",
        action="store_true",
        help="those that follow from the commit id, as `make test` runs them",
    )
    which.add_argument(
        "--count",
        type=int,
        help="how many seeds from a random one",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="processes (default: one per core)",
    )
    parser.add_argument(
        "--first", action="store_true", help="one process, and the end at the first seed that fails"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="end with one line of JSON; everything else goes to stderr",
    )
    return parser


def _chosen(given: argparse.Namespace, out: TextIO) -> range:
    """The seeds of a run; they are printed, for a replay."""
    if given.seeds is not None:
        return given.seeds  # type: ignore[no-any-return]
    if given.ci:
        seeds, source = commit_seeds()
        origin = f"{len(seeds)} seeds that follow from {source}"
    elif given.count is not None:
        seeds = random_seeds(max(given.count, 1))
        origin = "random seeds"
    else:
        seeds, origin = FIXED, f"{len(FIXED)} fixed seeds"
    print(f"{origin}, SEEDS={shown(seeds)}", file=out, flush=True)
    return seeds


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit code."""
    given = _parser().parse_args(arguments)
    out = sys.stderr if given.json else sys.stdout
    chosen = _chosen(given, out)
    seeds = iter(chosen)
    if given.first:
        return _first_failure(seeds, out)
    run = Run(out)
    interrupted = False
    try:
        run.over(seeds, max(given.workers, 1))
    except KeyboardInterrupt:
        interrupted = True
        for process in active_children():
            process.terminate()
    result = run.result
    report(result, out)
    if interrupted:
        print(f"\ninterrupted after {result.seeds} of {len(chosen)} seeds", file=out)
    _print_failures(result, out)
    if given.json:
        sys.stdout.write(json.dumps(result.as_json()) + "\n")
    if interrupted:
        return _INTERRUPTED
    return 1 if result.failures else 0


def _print_failures(result: Result, out: TextIO) -> None:
    """Print the last lines of a run, which the repository's hooks parse."""
    if result.failures:
        print("", *result.failures, sep="\n", file=out)
        print(
            f"{len(result.failures)} seeds broke an invariant: {result.failing_seeds}",
            file=out,
            flush=True,
        )


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
