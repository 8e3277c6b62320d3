"""What seeds draw from: every incident, and more faults where a call is seldom made."""

import random
from collections import Counter

import pytest

from verification.simulation import StormOptions, simulate
from verification.simulation.environment.calls import SITES, Weather
from verification.simulation.environment.scheduler import Host, Scheduler
from verification.simulation.incidents.choices import INCIDENTS, RARE_SITES
from verification.simulation.incidents.data import DataIncidents
from verification.simulation.incidents.hosts import HostIncidents
from verification.simulation.incidents.streams import StreamIncidents
from verification.simulation.incidents.table import TableIncidents
from verification.simulation.scenario import scenario_of
from verification.simulation.world import World


def test_a_seldom_call_gets_more_faults():
    """Otherwise a cell stays empty by chance, as it did in one of some hundred runs."""
    assert {*RARE_SITES} <= {*SITES}
    assert World(0, scenario_of(0)).weather.rare_sites == RARE_SITES
    hits = Counter()
    for factor in (1.0, 12.0):
        weather = Weather(random.Random(1), chance=0.01, rare_sites={"sink.ensure": factor})
        host = Host("host", Scheduler(1))
        for _ in range(2_000):
            hits[factor] += weather.draw(host, "sink.ensure") is not None
    assert 5 * hits[1.0] < hits[12.0]


def methods(kind):
    return {name for name, value in vars(kind).items() if name[0] != "_" and callable(value)}


def test_seeds_draw_from_every_incident():
    kinds = (HostIncidents, DataIncidents, StreamIncidents, TableIncidents)
    incidents = set.union(*map(methods, kinds))
    assert {*INCIDENTS} == incidents - {"later"}
    assert len({*INCIDENTS}) == len(INCIDENTS)


FIRST = {"seek": 431, "put_back_table": 213}
"""Seeds that have had one. The others follow when these have none any more."""


@pytest.mark.parametrize("incident", sorted(methods(TableIncidents)))
def test_an_incident_of_the_table_happens_in_one_of_a_few_seeds(incident):
    """The counter says that the table has changed, not only that it was tried."""
    chosen = INCIDENTS.index(incident)
    done = 0
    seeds = range(chosen, 12 * len(INCIDENTS), len(INCIDENTS))
    first = FIRST.get(incident, chosen)
    for seed in sorted(seeds, key=lambda seed: seed != first):
        outcome = simulate(seed, StormOptions())
        assert outcome.violations == (), outcome.timeline()
        assert outcome.faults["incident", incident] > 0
        done += outcome.faults["incident", f"{incident} (done)"]
        if done:
            return
    pytest.fail(f"{incident} has changed nothing")
