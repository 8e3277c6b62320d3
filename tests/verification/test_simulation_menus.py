"""Menus of incidents: the seeds of older menus keep their schedules."""

import hashlib
import random
from collections import Counter
from dataclasses import replace

import pytest

from verification.simulation import StormOptions, simulate
from verification.simulation.environment.calls import Weather
from verification.simulation.environment.scheduler import Host, Scheduler
from verification.simulation.incidents.data import DataIncidents
from verification.simulation.incidents.hosts import HostIncidents
from verification.simulation.incidents.menu import CURRENT_MENU, MENUS
from verification.simulation.incidents.storm import Storm
from verification.simulation.incidents.streams import StreamIncidents
from verification.simulation.scenario import scenario_of
from verification.simulation.world import World

SEEDS_OF_ISSUE_13 = {
    "S3: a checkpoint went back from SHARD_END": (7002791,),
    "L1: a shard stood still for ever": (9005499,),
    "S5: two processes under one worker id, before the parent had ended": (7000208, 9003081),
    "L1: a row was deleted by hand": (
        5000875,
        7002930,
        7003865,
        9000062,
        9000919,
        9003765,
        9005435,
        9006138,
        9007054,
        9007729,
    ),
    "L4: leases assigned to dead workers": (7002910, 9003150, 9007265),
    "L3: back and forth under one worker id": (7000325,),
    "S4, S5: a late writer of an at-least-once sink": (7000813, 7002098, 9006772, 9007757),
}
"""What each seed broke under menu 1 when it was found."""


@pytest.mark.parametrize(
    "seed", [seed for seeds in SEEDS_OF_ISSUE_13.values() for seed in seeds], ids=str
)
def test_a_seed_that_once_broke_an_invariant_keeps_it(seed):
    outcome = simulate(seed, StormOptions(menu=1))
    assert outcome.violations == (), outcome.timeline()
    assert outcome.incidents > 0


def timelines(menu, seeds=(7002791,)):
    outcomes = [simulate(seed, StormOptions(menu=menu)) for seed in seeds]
    return [(one.lines, one.steps, sorted(one.faults.items())) for one in outcomes]


@pytest.mark.parametrize("menu", sorted(MENUS))
def test_a_menu_that_is_added_changes_no_timeline_of_an_older_one(monkeypatch, menu):
    before = timelines(menu)
    newest = MENUS[CURRENT_MENU]
    added = replace(
        newest,
        version=CURRENT_MENU + 1,
        incidents=(*newest.incidents, "nothing"),
        sites=newest.sites[:-1],
        faults=newest.faults[:-1],
    )
    monkeypatch.setitem(MENUS, added.version, added)
    monkeypatch.setattr(HostIncidents, "nothing", lambda _self: None, raising=False)
    assert timelines(menu) == before
    assert timelines(added.version) != before


def digest(value):
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


SCENARIO_OF_MENU_1 = (
    "streams",
    "initial_position",
    "exactly_once",
    "aggregates",
    "steered",
    "steered_call",
    "rehearsal",
)
SCENARIO_OF_MENU_2 = (*SCENARIO_OF_MENU_1, "reports_cpu", "scan_page_rows")
SCENARIO_OF_MENU_3 = (*SCENARIO_OF_MENU_2, "hands_back")
SCENARIO_OF_MENU_4 = SCENARIO_OF_MENU_3
SCENARIO_OF_MENU_5 = (*SCENARIO_OF_MENU_4, "leaderless")
SCENARIO_OF_MENU_6 = (*SCENARIO_OF_MENU_5, "saves_scans")


@pytest.mark.parametrize(
    ("menu", "names", "drawn", "planned"),
    [
        (1, SCENARIO_OF_MENU_1, "ce252cff4544be83", "bd49fc32dfd18641"),
        (2, SCENARIO_OF_MENU_2, "e4d1802b99ec49f8", "3f6996d59e58ab36"),
        (3, SCENARIO_OF_MENU_3, "03123cf9cdf6d426", "1edcfb2c4d000ecb"),
        (4, SCENARIO_OF_MENU_4, "27daced8a9b160a5", "27be2701b05ff375"),
        (5, SCENARIO_OF_MENU_5, "b3eef1fef98c2c2b", "142fd0ba1c36529a"),
        (6, SCENARIO_OF_MENU_6, "b3eef1fef98c2c2b", "572c93f7c592c589"),
        (7, SCENARIO_OF_MENU_6, "85d71804c52134c4", "88234e7421d48f2f"),
        (8, SCENARIO_OF_MENU_6, "f81ac89045952ed6", "534b22bd59f6d51f"),
        (9, SCENARIO_OF_MENU_6, "f81ac89045952ed6", "534b22bd59f6d51f"),
        (10, SCENARIO_OF_MENU_6, "cf57560ccdcb2c8a", "fdc98166726d40d8"),
    ],
)
def test_a_released_menu_is_never_changed(menu, names, drawn, planned):
    """A seed of a menu keeps its plan: these digests are not to be updated."""
    chosen = MENUS[menu]
    assert digest((chosen.incidents, chosen.sites, chosen.faults, chosen.cells)) == drawn
    worlds = [World(seed, scenario_of(seed, menu)) for seed in (0, 17, 7002791, 9005499)]
    plans = [
        (
            [getattr(world.scenario, name) for name in names],
            Storm(world, StormOptions(menu=menu)).plan,
        )
        for world in worlds
    ]
    assert digest(plans) == planned


def test_a_seldom_call_gets_more_faults_from_menu_9_on():
    """Otherwise a cell stays empty by chance, as it did in one of some hundred runs of CI."""
    assert MENUS[8].rare_sites == {}
    rare = MENUS[9].rare_sites
    assert rare["sink.fence"] > 1
    assert {*rare} <= {*MENUS[9].sites}
    worlds = [World(0, scenario_of(0, menu)) for menu in (8, 9)]
    assert [world.weather.rare_sites for world in worlds] == [{}, rare]
    hits = Counter()
    for factor in (1.0, 12.0):
        weather = Weather(random.Random(1), chance=0.01, rare_sites={"sink.fence": factor})
        host = Host("host", Scheduler(1))
        for _ in range(2_000):
            hits[factor] += weather.draw(host, "sink.fence") is not None
    assert 5 * hits[1.0] < hits[12.0]


def methods(kind):
    return {name for name, value in vars(kind).items() if name[0] != "_" and callable(value)}


def test_the_newest_menu_has_every_incident_and_no_menu_loses_one():
    incidents = methods(HostIncidents) | methods(DataIncidents) | methods(StreamIncidents)
    assert {*MENUS[CURRENT_MENU].incidents} == incidents - {"later"}
    for version in range(2, CURRENT_MENU + 1):
        older = MENUS[version - 1].incidents
        assert MENUS[version].incidents[: len(older)] == older


def test_an_unknown_menu_is_refused():
    with pytest.raises(
        ValueError,
        match=r"menu=99 is not a menu. Write one of \[1, 2, 3, 4, 5, 6, 7, 8, 9, 10\]",
    ):
        simulate(1, StormOptions(menu=99))
