"""Shared by all tests: one Spark session for the whole run, because a session takes five seconds to
start.

Property tests draw the same cases in every run, so that a run tells about the change and not about
the day; `HYPOTHESIS_PROFILE=explore` draws new ones. `make test-long` draws three times as many.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import botocore.hooks
import botocore.session
import pytest
import typer.main
from hypothesis import is_hypothesis_test, settings
from hypothesis.internal.conjecture import providers

from tests.support.botocore_sessions import share_handlers
from tests.support.examples import EVERY, SHORT, register_profiles

# fixtures of the fan-out files
from tests.support.fan_out_world import aws, over, subscriptions  # noqa: F401
from tests.support.resume import Resume, state_of_the_tree
from tests.support.seeds import RESULT, SeedsOfCi, result_of_seeds
from tests.support.shares import Durations, Progress

if TYPE_CHECKING:
    from dagster import DagsterInstance
    from pyspark.sql import SparkSession


register_profiles()
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", SHORT))
if settings.get_current_profile_name() == SHORT:
    # Otherwise Hypothesis mixes the constants of all modules that are imported into what it draws:
    # cases would depend on them, and every process parses all modules of a fresh clone once more.
    providers.is_local_module_file = lambda _path: False


# For JVMs that live for seconds: without the second compiler and the collector's threads they take
# two thirds of the processor time. The classes of Spark's own jars need no verification, and the
# first compiler alone has a cache of 48 MB, which fills up: its code is then compiled again.
JVM = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
os.environ.setdefault("SPARK_SUBMIT_OPTS", JVM)

# Most tests that talk to a server create clients of their own. A loader that all sessions share
# parses the files of botocore once and lists its services once, which is half of a client's time.
botocore.session.create_loader = functools.cache(botocore.session.create_loader)
share_handlers()


# The current names of all events are found again for each session and each client.
class EventAliaser(botocore.hooks.EventAliaser):
    """Keeps the names of events for the whole run. All sessions have the same aliases."""

    names: ClassVar[dict[str, str]] = {}

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._alias_name_cache = self.names


botocore.session.EventAliaser = EventAliaser  # type: ignore[misc]

# Each run of a command would make the tree of all commands again. typer.testing is imported later.
typer.main.get_command = functools.cache(typer.main.get_command)

# delta-rs and obstore parse all certificates of the machine for each store that is opened, also
# where its address is http://127.0.0.1. Without any they refuse to start; no test needs more.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "support" / "certificate.pem")
os.environ.pop("SSL_CERT_DIR", None)

# Nothing that the collection makes is garbage until the end. Tests make much, and few cycles.
gc.disable()
gc.set_threshold(5_000, 10, 10)


SEEDS = pytest.StashKey[SeedsOfCi]()
TESTS = Path(__file__).parent.resolve()
TESTS_OF_SEEDS = TESTS / "verification" / "test_simulation.py"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", metavar="FILE", help="leave out what passed; see support/resume")
    parser.addoption(
        "--write-durations", action="store_true", help="write support/durations.json again"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """With several worker processes each unit stays in one of them."""
    # a run may be without pytest-xdist
    from tests.support.scheduling import UnitScheduling  # noqa: PLC0415

    return UnitScheduling(config, log)


def pytest_configure(config: pytest.Config) -> None:
    """With several worker processes the first process, which collects nothing, runs the seeds."""
    # In the background of a script SIGINT is ignored. Dagster would copy that to SIGTERM, and no
    # process of a pool could be ended.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    first = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    selected = (Path(arg.partition("::")[0]).resolve() for arg in config.args)
    if first and any(TESTS_OF_SEEDS.is_relative_to(path) for path in selected):
        config.stash[SEEDS] = SeedsOfCi()
    if first:
        config.pluginmanager.register(Progress(config, Durations()))
    if (path := config.getoption("resume")) is not None:
        config.pluginmanager.register(Resume(Path(path), state_of_the_tree()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """In a fresh clone each worker process would rewrite the asserts of all tests, which is two
    thirds of the collection. Each begins with its share, and finds the files of the others.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or [Path(arg).resolve() for arg in session.config.args] != [TESTS]:
        return
    first = int(worker["workerid"].removeprefix("gw"))
    for path in sorted(TESTS.rglob("test_*.py"))[first :: worker["workercount"]]:
        name = ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)
        # the collection imports what failed again, and reports it
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def pytest_collection_finish(session: pytest.Session) -> None:
    """With one process, it runs the seeds where a test needs them. What was imported and collected
    is in no later garbage collection.
    """
    gc.freeze()
    gc.enable()
    config = session.config
    needed = any("seeds_of_ci" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not config.option.collectonly and RESULT not in os.environ:
        config.stash[SEEDS] = SeedsOfCi()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Ends the seeds."""
    if (seeds := config.stash.get(SEEDS, None)) is not None:
        seeds.stop()


def pytest_itemcollected(item: pytest.Item) -> None:
    """All property tests are among the long ones, too."""
    is_property = is_hypothesis_test(getattr(item, "obj", None))
    if is_property and settings.get_current_profile_name() == EVERY:
        item.add_marker(pytest.mark.long)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several worker processes the longest units begin first. What waits for the seeds is
    last.
    """
    if hasattr(config, "workerinput"):
        Durations().sort(items)
        items.sort(key=lambda item: "seeds_of_ci" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def seeds_of_ci() -> subprocess.CompletedProcess[str]:
    """The seeds of the commit, run to their end."""
    return result_of_seeds(timeout_seconds=1_100)


@pytest.fixture(scope="session")
def dagster_instance() -> Iterator[DagsterInstance]:
    """An ephemeral instance of Dagster, whose tables take longer to make than most tests. Who uses
    it wipes it before.
    """
    # runs without these tests need no Dagster
    import dagster as dg  # noqa: PLC0415

    with dg.DagsterInstance.ephemeral() as instance:
        yield instance


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """A Spark session on two cores; `test_spark_ways` runs itself once more where
    KCL_TEST_SPARK_MASTER says.
    """
    # runs without Spark tests need no pyspark
    from kcl_pipeline.spark.session import build_session  # noqa: PLC0415

    session = build_session(
        "tests",
        {
            "spark.master": os.environ.get("KCL_TEST_SPARK_MASTER", "local[2]"),
            "spark.executor.extraJavaOptions": JVM,
        },
    )
    yield session
    session.stop()
