"""`kcl-pipeline top`: the snapshot, the page and the keys."""

from __future__ import annotations

import os
import pty
import termios
import threading
import time
from dataclasses import replace

import pytest
from rich.console import Console

from kcl_pipeline.cli.target import target
from kcl_pipeline.cli.top.command import Refresher
from kcl_pipeline.cli.top.keys import ESCAPE, Keyboard, Sort, ViewState, split_keys
from kcl_pipeline.cli.top.snapshot import (
    HANDOFF,
    LeaseRow,
    OwnerChange,
    OwnerChanges,
    Snapshot,
    WorkerRow,
    read_snapshot,
)
from kcl_pipeline.cli.top.view import render, sorted_leases, sorted_workers
from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.leases.application.control import Pause
from kcl_pipeline.leases.lease.values import Lease
from kcl_pipeline.leases.state.worker_status import LeaseLag, WorkerStatus
from kcl_pipeline.leases.tables import WorkerMetrics
from kcl_pipeline.position import SHARD_END, TRIM_HORIZON
from tests.support.cli_fleet import run, run_json

pytest_plugins = ["tests.support.cli_fixtures"]

WORKERS = (
    WorkerRow("w-1", 2, 30.0, 20.0, 1_000, 3.0),
    WorkerRow("w-2", 1, 50.0, None, 90_000, 4.0, ("hung for 20 min in step writing",)),
    WorkerRow("w-3", 0, 0.0, None, None, 5.0),
)
LEASES = (
    LeaseRow("shardId-2", "w-1", "held", 1_000, False, 10.0, "49"),
    LeaseRow("shardId-1", "w-2", "paused", 90_000, False, 50.0, "50"),
    LeaseRow("shardId-4", "w-1", "held", 500, True, 20.0, "51"),
    LeaseRow("shardId-3", None, "free", None, False, None, "TRIM_HORIZON"),
    LeaseRow("shardId-5", "w-9", "held", None, False, None, "52"),
)
MOVES = (OwnerChange(1_000.0, "shardId-1", "w-1", "w-2", "moved"),)
SNAPSHOT = Snapshot("orders", 1_000.0, "leader w-1", None, WORKERS, LEASES, 7, MOVES)


def page(snapshot: Snapshot, state: ViewState | None = None, **options) -> str:
    console = Console(width=options.pop("width", 120), markup=True, emoji=True, record=False)
    with console.capture() as shown:
        console.print(render(snapshot, state or ViewState(), **options))
    return shown.get()


def keys_of(rows) -> str:
    return "".join(row.lease_key[-1] for row in rows)


@pytest.mark.parametrize(
    ("sort", "leases", "workers"),
    [
        (Sort.LAG, "31245", "213"),
        (Sort.WORKER, "32415", "123"),
        (Sort.SHARD, "12345", "123"),
        (Sort.RATE, "14235", "213"),
    ],
)
def test_rows_are_sorted(sort, leases, workers):
    state = ViewState(sort)
    assert keys_of(sorted_leases(LEASES, state)) == leases
    assert "".join(row.worker_id[-1] for row in sorted_workers(WORKERS, state)) == workers


@pytest.mark.parametrize(
    ("text", "leases"), [("W-1", "24"), ("shardid-3", "3"), ("pause", "1"), ("nothing", "")]
)
def test_rows_are_filtered(text, leases):
    found = sorted_leases(LEASES, ViewState(Sort.SHARD, text))
    assert keys_of(found) == leases


def test_a_filter_finds_a_key_as_it_is_shown():
    row = replace(LEASES[0], lease_key="1:orders:9:shardId-000000000012")
    for text in ("orders:shardid-12", "000012", "1:orders:9:"):
        assert sorted_leases([row], ViewState(filter=text)) == [row]
    assert sorted_leases([row], ViewState(filter="shardId-1200")) == []


def test_the_page():
    shown = page(SNAPSHOT)
    lines = shown.splitlines()
    assert lines[:2] == [
        "orders at 00:16:40 UTC, 3 workers, 5 leases and 7 ended, 1 without an owner",
        "80.0 KiB/s, largest lag 90.0 s; leader w-1",
    ]
    assert "hung for 20 min in step writing" in shown
    assert "<= 0.5 s" in shown
    assert any("shardId-3" in line and "(no owner)" in line for line in lines)
    assert "Moves: 1" in shown
    assert "q quit" not in shown
    assert "(none)" in page(replace(SNAPSHOT, moves=()))


def test_what_needs_attention_is_in_the_head():
    shown = page(replace(SNAPSHOT, pause="paused by ann", bad_rows=2), problem="no network")
    assert "paused by ann" in shown
    assert "2 rows cannot be parsed" in shown
    assert "not refreshed: no network" in shown


@pytest.mark.parametrize("width", [20, 80, 200])
@pytest.mark.parametrize("height", [5, 12, 24, 60])
def test_the_page_fits_into_the_terminal(height, width):
    leases = tuple(replace(LEASES[0], lease_key=f"shardId-{n:012}") for n in range(500))
    workers = tuple(replace(WORKERS[1], worker_id=f"w-{n}") for n in range(40))
    many = replace(SNAPSHOT, leases=leases, workers=workers, moves=MOVES * 20)
    shown = page(many, height=height, width=width).splitlines()
    assert len(shown) <= max(height, 15)
    assert all(len(line) <= width for line in shown)
    if width >= 80:
        assert any(line.startswith("Leases: 500") for line in shown)
        assert any(line.startswith("and ") for line in shown)
        assert "sorted by lag" in shown[-1]
    if height == 60 and width >= 80:
        assert sum("shardId-" in line for line in shown) >= 25


def test_a_narrow_terminal_shortens_names_and_keeps_numbers():
    key, owner = "123456789012:orders:1700000000:shardId-000000000012", "ip-10-0-0-1" * 5 + "-17"
    held = replace(LEASES[1], lease_key=key, owner=owner, checkpoint="4" * 56)
    worker = replace(WORKERS[1], worker_id=owner, states=("hung for 20 min " * 5,))
    found = replace(SNAPSHOT, leases=(held,), workers=(worker,))
    lines = page(found, height=30, width=80).splitlines()
    (row,) = (line for line in lines if "shardId-12 " in line)
    assert row.startswith("orders:shardId-12 ")
    assert all(text in row for text in ("-17 ", "paused", "90.0 s", "50.0"))
    (row,) = (line for line in lines if "4 s ago" in line)
    assert all(text in row for text in ("ip-10", "50.0", "90.0 s", "hung"))
    whole = page(found, width=400)
    assert all(text in whole for text in (key, owner, "4" * 56))


def test_the_line_of_keys_fits_into_80_columns():
    assert page(SNAPSHOT, height=24, width=80).rstrip().endswith("k KiB/s")


def test_text_of_rows_is_escaped_and_no_markup():
    evil = "[red]x[/red]\x1b[2J\n:boom:\u202e"
    snapshot = Snapshot(
        evil,
        0.0,
        evil,
        evil,
        (WorkerRow(evil, 1, 1.0, None, None, 1.0, (evil,)),),
        (LeaseRow(evil, evil, evil, 1, False, 1.0, evil),),
        0,
        (OwnerChange(0.0, evil, evil, evil, evil),),
    )
    shown = page(snapshot, ViewState(filter="boom"), width=400, height=40, problem=evil)
    assert shown.count("[red]x[/red]\\x1b[2J\\n:boom:\\u202e") >= 3, "the head"
    whole = page(snapshot, ViewState(filter="boom"), width=400)
    assert whole.count("[red]x[/red]\\x1b[2J\\n:boom:\\u202e") >= 10
    for text in (shown, whole):
        assert "\x1b[2J" not in text
        assert "\u202e" not in text


def after(keys: list[str], state: ViewState | None = None) -> ViewState:
    found = state or ViewState()
    for key in keys:
        found = found.after(key)
    return found


def test_keys_sort_and_quit():
    assert [after([key]).sort for key in "lwskx"] == [
        Sort.LAG,
        Sort.WORKER,
        Sort.SHARD,
        Sort.RATE,
        Sort.LAG,
    ]
    assert after(["w", "\x1b[A", "\x1bOP"]) == ViewState(Sort.WORKER)
    for key in ("q", "\x03", "\x04", "\x1c"):
        assert after([key]).is_done
    assert after(["/", "\x03"]).is_done


def test_keys_of_a_filter():
    assert after(list("/qé w")) == ViewState(filter="qé w", is_typing=True)
    assert after(["/", "a", "b", "\x7f", "\x1b[D", "\x01", "\r", "w"]) == ViewState(
        Sort.WORKER, "a"
    )
    assert after(["/", "a", ESCAPE]) == ViewState()
    assert after(["/", "a", "\r", ESCAPE]) == ViewState()
    assert after(["/", "\x7f", "\r"]) == ViewState()
    assert len(after(["/", *"x" * 500]).filter) == 100


def test_special_keys_are_one_key():
    assert split_keys("a\x1b[A\x1b[1;5Cq\x1bOP\x1b") == [
        "a",
        "\x1b[A",
        "\x1b[1;5C",
        "q",
        "\x1bOP",
        ESCAPE,
    ]


def test_the_keyboard_restores_the_terminal():
    main, terminal = pty.openpty()
    try:
        before = termios.tcgetattr(terminal)
        keyboard = Keyboard(terminal)
        with keyboard:
            assert not termios.tcgetattr(terminal)[3] & (termios.ECHO | termios.ISIG)
            assert keyboard.read(0) == []
            os.write(main, "é".encode()[:1])
            assert keyboard.read(1) == []
            os.write(main, "é".encode()[1:] + b"\x03")
            assert keyboard.read(1) == ["é", "\x03"]
        assert termios.tcgetattr(terminal) == before
        with pytest.raises(ZeroDivisionError), keyboard:
            raise ZeroDivisionError
        assert termios.tcgetattr(terminal) == before
        with keyboard:
            os.close(main)
            main = -1
            assert keyboard.read(1) is None
    finally:
        os.close(terminal)
        if main >= 0:
            os.close(main)


def lease(key: str, owner: str | None, **changes) -> Lease:
    return Lease(key, TRIM_HORIZON, owner=owner, **changes)


def test_moves_are_changes_between_two_snapshots():
    log = OwnerChanges()
    first = [lease("s-1", "a"), lease("s-2", "a", checkpoint_owner="b"), lease("s-3", None)]
    handoff = OwnerChange(1.0, "s-2", "b", "a", HANDOFF)
    assert log.follow(first, 1.0) == (handoff,)
    assert log.follow(first, 2.0) == (handoff,)
    second = [lease("s-1", "b"), lease("s-2", "a"), lease("s-3", "b"), lease("s-4", "a")]
    assert log.follow(second, 3.0) == (
        OwnerChange(3.0, "s-4", None, "a", "assigned"),
        OwnerChange(3.0, "s-3", None, "b", "assigned"),
        OwnerChange(3.0, "s-1", "a", "b", "moved"),
        replace(handoff, outcome="moved"),
    )
    third = [lease("s-1", None), lease("s-2", "b", checkpoint_owner="a")]
    assert log.follow(third, 4.0)[:2] == (
        OwnerChange(4.0, "s-2", "a", "b", HANDOFF),
        OwnerChange(4.0, "s-1", "b", None, "released"),
    )
    assert log.follow([lease("s-2", "a")], 5.0)[0].outcome == "canceled"


def test_a_handoff_of_an_ended_lease_is_not_open_for_ever():
    log = OwnerChanges()
    log.follow([lease("s-1", "a", checkpoint_owner="b")], 1.0)
    assert log.follow([], 2.0)[0].outcome == "canceled"


def test_only_the_last_moves_are_kept():
    log = OwnerChanges()
    for number in range(60):
        found = log.follow([lease("s-1", f"w-{number}")], float(number))
    assert [move.to_worker for move in found] == [f"w-{number}" for number in range(59, 39, -1)]


def test_a_failed_refresh_keeps_the_last_snapshot():
    answers = iter(
        [UnavailableError("no network"), replace(SNAPSHOT, ended=8), ZeroDivisionError()]
    )
    step, stepped = threading.Semaphore(0), threading.Semaphore(0)

    def read():
        found = next(answers)
        if isinstance(found, Exception):
            raise found
        return found

    class Stop(threading.Event().__class__):
        def wait(self, timeout=None):
            stepped.release()
            step.acquire()
            return False

    refresher = Refresher(read, SNAPSHOT, 2.0, Stop())
    thread = threading.Thread(target=refresher.run, daemon=True)
    thread.start()
    stepped.acquire()
    assert refresher.latest == (SNAPSHOT, None)
    for expected in ((SNAPSHOT, "no network"), (replace(SNAPSHOT, ended=8), None)):
        step.release()
        stepped.acquire()
        snapshot, problem = refresher.latest
        assert snapshot == expected[0]
        assert (problem or "").startswith(expected[1] or "")
        assert (problem is None) is (expected[1] is None)
    step.release()
    thread.join(10)
    with pytest.raises(ZeroDivisionError):
        _ = refresher.latest


def test_a_snapshot_of_an_application(environment, fleet):
    lags = (LeaseLag(fleet.keys[0], 61_250),)
    fleet.tables.workers.report(
        WorkerMetrics("blue-1", int(time.time()), status=WorkerStatus(61_250, lags=lags))
    )
    ended = fleet.tables.lease.get(fleet.keys[1])
    assert fleet.tables.lease.update_checkpoint(ended, checkpoint=SHARD_END)
    assert fleet.tables.lease.initiate_handoff(fleet.tables.lease.get(fleet.keys[0]), "blue-2")
    app, log = target(fleet.name, None, None), OwnerChanges()
    found = read_snapshot(app, log)
    assert (len(found.leases), found.ended, len(found.workers)) == (3, 1, 2)
    rows = {row.lease_key: row for row in found.leases}
    assert rows[fleet.keys[0]].state == "handoff to blue-2"
    assert (rows[fleet.keys[0]].owner, rows[fleet.keys[0]].lag_millis) == ("blue-1", 61_250)
    assert {row.worker_id: row.leases for row in found.workers} == {"blue-1": 1, "blue-2": 1}
    assert [(move.lease_key, move.outcome) for move in found.moves] == [(fleet.keys[0], HANDOFF)]
    assert "leader blue-1" in found.leader
    table = fleet.tables.coordinator
    assert table.put_pause(Pause("ann", reason="later"), replacing=table.read_control())
    assert "paused by ann: later" in str(read_snapshot(app, log).pause)


def test_without_a_terminal_it_prints_one_page(environment, shared):
    for arguments in ([], ["--once"]):
        shown = run("top", "-a", shared.name, *arguments).stdout
        assert "\x1b" not in shown
        assert all(text in shown for text in (*shared.keys, "blue-1", "blue-2"))
        assert "q quit" not in shown
    filtered = run("top", "-a", shared.name, "--filter", shared.keys[2], "--sort", "rate").stdout
    assert shared.keys[2] in filtered
    assert shared.keys[0] not in filtered


def test_json_prints_one_snapshot(environment, shared):
    found = run_json("top", "-a", shared.name)
    assert found["application"] == shared.name
    assert [row["lease_key"] for row in found["leases"]]
    assert {row["worker_id"] for row in found["workers"]} == {"blue-1", "blue-2"}
    assert found["moves"] == []


def test_rows_that_cannot_be_parsed_do_not_end_it(environment, fleet):
    put = fleet.clients.dynamodb.put_item
    odd = {"leaseKey": {"S": "shardId-odd"}, "checkpoint": {"S": "\x1b[2J"}}
    put(TableName=fleet.name, Item=odd)
    name = fleet.settings.worker_metrics_table_name
    put(TableName=name, Item={"wid": {"S": "odd"}, "lut": {"S": "\x1b"}})
    lock = {"key": {"S": "Leader"}, "entityType": {"S": "LOCK"}, "ownerName": {"N": "1"}}
    put(TableName=fleet.settings.coordinator_state_table_name, Item=lock)
    shown = run("top", "-a", fleet.name, "--once").stdout
    assert "cannot be parsed" in shown
    assert all(key in shown for key in fleet.keys)
    assert "\x1b" not in shown
    assert run_json("top", "-a", fleet.name)["bad_rows"] >= 1


def test_an_application_that_does_not_exist_is_one_sentence(environment):
    assert "check the names" in run("top", "-a", "no-such-app", code=1).stderr
