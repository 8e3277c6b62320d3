"""The steps of docs/migrating.md, on the virtual clock, with what the page says is seen."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from kcl_pipeline.cli.doctor.records import check_client_version
from kcl_pipeline.leader import kcl2
from kcl_pipeline.leases import layout
from kcl_pipeline.leases.layout import CONFIG_3X
from kcl_pipeline.status.snapshot import Snapshot
from tests.guides.snippets import ROOT
from tests.support.java_fleet import COMPATIBLE, ROLLBACK, UPGRADE, V2, V3, Java3, Mixed
from tests.support.worker_world import numbered

READY, LOOK = 100.0, 10.0
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    """The ten minutes of the page, and the minute in which processes follow."""
    monkeypatch.setattr(kcl2, "READY_SECONDS", READY)
    monkeypatch.setattr(kcl2, "CHECK_SECONDS", LOOK)
    monkeypatch.setattr(layout, "LOOK_SECONDS", LOOK)


def steps_of(chapter: str) -> dict[str, str | None]:
    """The steps of a chapter, each with the block of text that the page shows."""
    page = (ROOT / "docs" / "migrating.md").read_text()
    text = page.partition(f"## {chapter}\n")[2].partition("\n## ")[0]
    found = {}
    for part in text.split("\n### ")[1:]:
        title, _, body = part.partition("\n")
        shown = re.search(r"```\n(.*?)\n```", body, re.DOTALL)
        found[title.partition(" ")[2]] = None if shown is None else shown[1]
    return found


def seen(fleet: Mixed) -> str:
    """What `kcl-pipeline doctor` says about the client version."""
    snapshot = Snapshot(
        application="app",
        at=fleet.clock.wall(),
        leases=fleet.leases.list_leases().leases,
        workers=tuple(fleet.rows.scan_workers().workers),
    )
    found = check_client_version(fleet.coordinator, snapshot)
    lines = [f"{found.level}: {found.sentence}", found.advice]
    return TIME.sub("TIME", "\n".join(line for line in lines if line))


def execute(chapter: str, fleet: Mixed, steps: dict[str, Callable[[Mixed], None]]) -> None:
    """Run every step of a chapter, and compare what is seen."""
    page = steps_of(chapter)
    assert list(page) == list(steps), "the test executes the steps of the page"
    for title, step in steps.items():
        fleet.put(*numbered(5, title))
        step(fleet)
        shown = page[title]
        if shown is not None:
            assert seen(fleet) == shown, title
    fleet.run(10)


def deploy_compatible(fleet: Mixed) -> None:
    fleet.run(60)
    assert fleet.owners() == {"w-1": 2, "j-1": 2, "j-2": 2}
    assert fleet.version() == UPGRADE


def replace_java(fleet: Mixed) -> None:
    del fleet.java["j-1"]
    fleet.join("w-2")
    fleet.run(40)
    fleet.java.clear()
    fleet.run(40)
    assert fleet.owners() == {"w-1": 3, "w-2": 3}


def wait_for_leader(fleet: Mixed) -> None:
    fleet.run(READY + 40)
    assert not fleet.worker.coordination.version.is_leaderless


def roll_back(fleet: Mixed) -> None:
    fleet.tool(ROLLBACK, V2, "rollback")
    fleet.run(LOOK + 5)
    fleet.join_java("j-3")
    fleet.run(40)
    assert fleet.owners() == {"w-1": 2, "w-2": 2, "j-3": 2}


def roll_forward(fleet: Mixed) -> None:
    fleet.java.clear()
    fleet.run(10)
    fleet.tool(V2, UPGRADE, "rollforward")
    fleet.run(LOOK + READY + 60)
    assert fleet.owners() == {"w-1": 3, "w-2": 3}


def end_migration(fleet: Mixed) -> None:
    fleet.settings = fleet.settings.model_copy(update={"client_version_config": CONFIG_3X})
    fleet.join("w-3")
    fleet.run(LOOK + 20)
    assert fleet.version() == V3
    assert fleet.owners() == {"w-1": 2, "w-2": 2, "w-3": 2}


def test_from_2x_to_3x_and_back():
    fleet = Mixed(shards=6)
    fleet.join_java("j-1", "j-2")
    steps = {
        "Deploy one worker with the 2.x setting": deploy_compatible,
        "Replace the other workers": replace_java,
        "Wait until a leader assigns the leases": wait_for_leader,
        "Go back, if you have to": roll_back,
        "Go forward again": roll_forward,
        "End the migration": end_migration,
    }
    execute("From KCL 2.x", fleet, steps)
    assert fleet.data() == sorted(fleet.sent), "the Java workers here process nothing"


def deploy_one(fleet: Mixed) -> None:
    fleet.run(60)
    assert fleet.owners() == {"w-1": 2, "j-1": 2, "j-2": 2}


def replace_java_3(fleet: Mixed) -> None:
    del fleet.java["j-1"]
    fleet.join("w-2")
    fleet.run(40)
    fleet.java.clear()
    fleet.run(60)
    assert fleet.owners() == {"w-1": 3, "w-2": 3}


def go_back(fleet: Mixed) -> None:
    fleet.run(10)
    assert fleet.data() == sorted(fleet.sent), "the Java workers here process nothing"
    fleet.join_java("j-4", kind=Java3)
    fleet.run(60)
    assert fleet.owners() == {"w-1": 2, "w-2": 2, "j-4": 2}


def test_from_3x_and_back():
    fleet = Mixed(shards=6, client_version_config=CONFIG_3X)
    fleet.join_java("j-1", "j-2", kind=Java3)
    steps = {
        "Deploy one worker": deploy_one,
        "Replace the other workers": replace_java_3,
        "Go back, if you have to": go_back,
    }
    execute("From KCL 3.x", fleet, steps)


def test_the_settings_of_the_page_exist():
    page = (ROOT / "docs" / "migrating.md").read_text()
    assert COMPATIBLE["client_version_config"] in page
