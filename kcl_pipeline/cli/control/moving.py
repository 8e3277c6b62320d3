"""`kcl-pipeline drain`, `kcl-pipeline move` and `kcl-pipeline rebalance`."""

from dataclasses import asdict
from typing import Annotated
from uuid import uuid4

import typer

from kcl_pipeline.cli.control.operator import DryRun, Wait, operated, report
from kcl_pipeline.cli.target import Application, AsJson, Pipeline, Streams, target
from kcl_pipeline.control import texts
from kcl_pipeline.control.moving import Moving

DRAIN_SECONDS = 120.0
MOVE_SECONDS = 60.0
BALANCE_SECONDS = 30.0


def drain(
    worker_id: Annotated[str, typer.Argument(metavar="WORKER", help="The worker.")],
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    wait: Wait = DRAIN_SECONDS,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Request a worker to end: it commits, its leases go to others, and it exits with 0.

    The leader sensor starts another worker if fewer than the desired ones run. The exit code is 1
    if the worker has not ended after the wait.
    """
    app = target(application, stream, pipeline)
    done = Moving(operated(app)).drain(worker_id, wait_seconds=wait, dry_run=dry_run)
    text = texts.drained(done, dry_run=dry_run)
    report(asdict(done), [text], as_json=as_json, ok=done.ended or dry_run or wait == 0)


def move(
    lease_key: Annotated[str, typer.Argument(metavar="LEASE", help="Key of the lease.")],
    to: Annotated[str, typer.Option("--to", help="The worker that gets the lease.")],
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    wait: Wait = MOVE_SECONDS,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Hand a lease to a worker. The former owner commits first, so no record is repeated.

    The leader may move it again when it balances. The exit code is 1 if the worker does not have
    the lease after the wait.
    """
    app = target(application, stream, pipeline)
    done = Moving(operated(app)).move(lease_key, to, wait_seconds=wait, dry_run=dry_run)
    text = texts.moved(done, dry_run=dry_run)
    report(asdict(done), [text], as_json=as_json, ok=done.done or dry_run or wait == 0)


def rebalance(
    application: Application = None,
    stream: Streams = None,
    pipeline: Pipeline = None,
    wait: Wait = BALANCE_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Let the leader balance the leases now, by the rules that it always uses.

    `kcl-pipeline plan` shows the moves before. The exit code is 1 if no leader took the request
    within the wait. A leader of the Java KCL never takes it.
    """
    app = target(application, stream, pipeline)
    taken = Moving(operated(app)).balance(uuid4(), wait_seconds=wait)
    report({"taken": taken}, [texts.balanced(taken=taken)], as_json=as_json, ok=taken or not wait)
