"""Settings and arguments that users write, the options of the data source, and the record of an
application.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any, Final

from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline
from kcl_pipeline.cli.target import target
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import OtherApplicationError, SettingsError, UnreadableRowError
from kcl_pipeline.events import LossReason, RecordsLost
from kcl_pipeline.leases import application as documents
from kcl_pipeline.leases.application import (
    ApplicationIdentity,
    Loss,
    Losses,
    RecordedStream,
    application_from_text,
    application_text,
    successor,
)
from kcl_pipeline.settings_errors import setting_names
from kcl_pipeline.spark.data_source.options import SourceOptions, parse_options
from tests.fuzz import values
from tests.fuzz.boundary import Boundary

ACCEPTED: Final = "accepted"
REFUSED: Final = "refused"

MOST_CHARACTERS: Final = 5_000
"""Of a message: a person reads it."""

NAMES: Final = tuple(setting_names(ConsumerSettings))
OPTIONS: Final = tuple(str(field.alias) for field in SourceOptions.model_fields.values())
STREAM: Final = "arn:aws:kinesis:eu-west-1:123456789012:stream/orders"
CHOICES: Final = ("auto", "polling", "fan_out", "skip", "PROVISIONED", "LATEST", "balanced", "2")
SINK: Final = DeltaSink("/lake/orders")
RECORD: Final = application_text(
    ApplicationIdentity("single_stream", (RecordedStream(STREAM, 1_700_000_000_000),), "delta:/x")
)
LOST: Final = Loss.of(RecordsLost("w-1", "shardId-1", LossReason.LEFT_RETENTION), 1_700_000_000_000)
LOSSES: Final = documents.LOSSES.text(
    Losses(
        count=3,
        acknowledged=2,
        acknowledged_millis=9,
        last=replace(LOST, after="7", end="before 9/2"),
        restored=("t-1", 58),
    )
)
WANTED: Final = ApplicationIdentity(
    "single_stream", (RecordedStream(STREAM, 1_700_000_000_000),), "delta:/x"
)


def value(random: Random, depth: int = 0) -> Any:
    """A value as Python, YAML or JSON may bring it, mostly of a type that some setting has."""
    kind = random.randrange(12 if depth < 3 else 9)
    if kind == 0:
        return random.choice((True, False, None))
    if kind < 4:
        return random.choice((0, 1, 5, 100, 2_000, 60_000, 10**6, -1, 2**31, 10**40))
    if kind == 4:
        return random.choice((0.0, 0.5, 1.0, 99.9, 1e300, float("inf"), float("nan"), -0.1))
    if kind < 7:
        return random.choice(CHOICES)
    if kind == 7:
        return random.choice(values.HOSTILE_TEXTS)
    if kind == 8:
        return random.choice((STREAM, "orders", "orders " * 30, "2026-01-31T12:00:00+00:00"))
    if kind == 9:
        return [value(random, depth + 1) for _ in range(random.randrange(4))]
    return {name(random): value(random, depth + 1) for _ in range(random.randrange(4))}


def name(random: Random) -> str:
    """The last part of a setting's name, at times misspelled or hostile."""
    known = random.choice(NAMES).rpartition(".")[2]
    kind = random.randrange(10)
    if kind == 0:
        return random.choice(values.HOSTILE_TEXTS)
    if kind == 1:
        return known.replace("_", "-").upper()
    if kind == 2:
        return known[: len(known) // 2] + known[len(known) // 2 + 1 :]
    return known


def draw_pipeline(random: Random) -> dict[str, Any]:
    """The arguments of a pipeline; few of them are wrong, so that some are accepted."""
    given: dict[str, Any] = {"name": "orders", "streams": ["orders"], "settings_overrides": {}}
    for _ in range(random.randrange(4)):
        group, _, setting = random.choice(NAMES).partition(".")
        part = given["settings_overrides"].setdefault(group, {})
        if isinstance(part, dict) and random.randrange(8):
            part[setting if random.randrange(6) else name(random)] = value(random)
        else:
            given["settings_overrides"][group] = value(random)
    if not random.randrange(5):
        key = random.choice(("name", "streams", "workers", "spark_config", name(random)))
        given[key] = value(random)
    if not random.randrange(30):
        given["settings_overrides"] = value(random)
    return given


def check_pipeline(given: Any) -> str:
    """Make the pipeline; a refusal is one bounded line of whole sentences."""
    arguments = {"sink": SINK, **given}
    if isinstance(arguments.get("workers"), list):
        arguments["workers"] = Fleet()
    try:
        made = KinesisPipeline(**arguments)
    except SettingsError as error:
        return refused(error)
    again = ConsumerSettings.model_validate(made.settings.model_dump())
    assert again == made.settings or "nan" in repr(again)
    assert again.lease_discovery_interval_millis > 0
    assert again.lease.renewal_interval_millis > 0
    return ACCEPTED


def refused(error: Exception, *, whole_sentence: bool = True) -> str:
    """Check the message of a refusal."""
    message = str(error)
    assert message.isprintable(), "a message is one line without control characters"
    assert len(message) <= MOST_CHARACTERS, f"{len(message)} characters"
    assert not whole_sentence or message.endswith((".", "?")), "a message is a sentence"
    return REFUSED


def draw_options(random: Random) -> dict[str, Any]:
    """Options of the data source, which are strings."""
    given = {"streamName": "orders"}
    for _ in range(random.randrange(4)):
        key = random.choice(OPTIONS) if random.randrange(6) else name(random)
        kind = random.randrange(4)
        if kind == 0:
            given[key] = random.choice(values.HOSTILE_TEXTS)
        elif kind == 1:
            given[key] = random.choice(values.HOSTILE_NUMBERS)
        else:
            given[key] = random.choice(("5", "64m", "true", "LATEST", "TRIM_HORIZON", "http://x:1"))
    return given


def check_options(given: Any) -> str:
    """Parse them."""
    try:
        options = parse_options(given)
    except SettingsError as error:
        return refused(error, whole_sentence=False)
    assert options.consumer.streams == options.streams
    return ACCEPTED


def draw_record(random: Random) -> bytes:
    """The text of an application's record, mutated."""
    return values.mutated(random, RECORD.encode()) if random.randrange(20) else RECORD.encode()


def check_record(given: Any) -> str:
    """Read it and compare a start with it."""
    try:
        record = application_from_text(given.decode("utf-8", "surrogateescape"))
        following = successor("orders", record.identity, WANTED)
    except (UnreadableRowError, OtherApplicationError) as error:
        return refused(error, whole_sentence=False)
    assert application_from_text(application_text(following)).identity == following
    return ACCEPTED


def draw_losses(random: Random) -> bytes:
    """The text of recorded losses, mutated."""
    return values.mutated(random, LOSSES.encode()) if random.randrange(20) else LOSSES.encode()


def check_losses(given: Any) -> str:
    """Read it, add a loss, acknowledge all, and read what would be written."""
    try:
        read = documents.LOSSES.parsed(given.decode("utf-8", "surrogateescape"))
    except UnreadableRowError as error:
        return refused(error, whole_sentence=False)
    following = read.with_losses([LOST])
    assert following.unacknowledged
    acknowledged = following.with_acknowledged(following, 5_000)
    assert not acknowledged.unacknowledged
    for losses in (read, following, acknowledged):
        assert documents.LOSSES.parsed(documents.LOSSES.text(losses)) == losses
        assert losses.sentence.isprintable()
    return ACCEPTED


def draw_command(random: Random) -> dict[str, Any]:
    """What `--application`, `--stream` and `--pipeline` may be given."""
    texts = (*values.HOSTILE_TEXTS, "orders", STREAM, "nosuch_module:x", "nosuch:", ":x", "x" * 500)
    return {
        "application": random.choice(texts) if random.randrange(3) else "orders",
        "streams": [random.choice(texts)] * random.randrange(2) or [STREAM],
        "pipeline": "nosuch_" + random.choice(texts) if not random.randrange(4) else None,
    }


def check_command(given: Any) -> str:
    """Find the application; what is wrong is one line."""
    from pydantic import ValidationError  # noqa: PLC0415 (only this boundary)

    from kcl_pipeline.cli.failures import sentence  # noqa: PLC0415 (likewise)

    try:
        target(given["application"], given["streams"], given["pipeline"], needs_streams=True)
    except (SettingsError, ValidationError) as error:
        message = sentence(error)
        assert message is not None
        assert "\n" not in message
        assert len(message) <= MOST_CHARACTERS
        return REFUSED
    return ACCEPTED


BOTH: Final = frozenset({ACCEPTED, REFUSED})
BOUNDARIES: Final = (
    Boundary("settings", draw_pipeline, check_pipeline, BOTH),
    Boundary("data_source_options", draw_options, check_options, BOTH),
    Boundary("application_record", draw_record, check_record, BOTH),
    Boundary("losses_record", draw_losses, check_losses, BOTH),
    Boundary("command_line_target", draw_command, check_command, BOTH),
)
