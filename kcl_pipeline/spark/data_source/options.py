"""Parse the options of `format("kinesis")`.

Names are in camel case and compared without case, as usual in Spark. A wrong option gives an error
of one sentence. This module needs neither Spark nor the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.alias_generators import to_camel

from kcl_pipeline.config import ConsumerSettings, RetrievalSettings
from kcl_pipeline.config.model import MAX_BYTES, MAX_NUMBER, STREAM_FORMS, is_stream
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.settings_errors import shown, suggestion
from kcl_pipeline.spark.data_source.offsets import Offset, ShardOffset, offset_from_json
from kcl_pipeline.text import printable

Mode = Literal["batch", "stream"]

MEBIBYTE: Final = 1024 * 1024
_SIZE: Final = re.compile(r"^\s*(\d+)\s*([kmg]?)(?:i?b)?\s*$", re.IGNORECASE)
_UNITS: Final = {"": 1, "k": 1024, "m": MEBIBYTE, "g": 1024 * MEBIBYTE}
_SECRET: Final = frozenset({"secretAccessKey", "sessionToken"})
_ONLY_STREAM: Final = (
    "max_records_per_trigger",
    "max_bytes_per_trigger",
    "max_records_per_shard_per_trigger",
)
_POSITIONS: Final = (
    'TRIM_HORIZON, LATEST, "AT_TIMESTAMP 2026-01-31T12:00:00Z" (with a time '
    'zone), or offsets as JSON {"stream": {"shardId-…": {…}}}'
)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a query starts or ends.

    `timestamp` belongs to AT_TIMESTAMP, `offsets` to OFFSETS.
    """

    kind: Literal["TRIM_HORIZON", "LATEST", "AT_TIMESTAMP", "OFFSETS"]
    timestamp: datetime | None = None
    offsets: Offset | None = None

    @property
    def millis(self) -> int | None:
        """The timestamp in epoch milliseconds."""
        return None if self.timestamp is None else round(self.timestamp.timestamp() * 1000)

    def offsets_of(self, stream: str, option: str) -> dict[str, ShardOffset]:
        """Return the offsets of a stream, at least one.

        Raises:
            SettingsError: This option has none.
        """
        written = (self.offsets or {}).get(stream)
        if not written:
            raise SettingsError(
                f"option {option} has no offsets of stream {stream}; add them, or remove the "
                "stream from streamName"
            )
        return written


class SourceOptions(BaseModel):
    """All options. The error message of a field contains its description as advice."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        populate_by_name=True,
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,
    )

    stream_name: str | None = Field(
        None, min_length=1, description="the stream's name or ARN, several separated by commas"
    )
    stream_arn: str | None = Field(
        None,
        pattern=r"^\s*arn:",
        description="arn:aws:kinesis:<region>:<account>:stream/<name>, several separated by commas",
    )
    region: str | None = Field(
        None,
        min_length=1,
        description="an AWS region such as eu-central-1, or leave it out and set AWS_REGION",
    )
    endpoint_url: str | None = Field(
        None, pattern=r"^https?://", description="http://host:port or https://host"
    )
    profile: str | None = Field(
        None, min_length=1, description="a profile of ~/.aws/config that every executor has"
    )
    access_key_id: str | None = Field(
        None, min_length=1, description="an access key id, together with secretAccessKey"
    )
    secret_access_key: str | None = Field(
        None, min_length=1, repr=False, description="a secret access key, together with accessKeyId"
    )
    session_token: str | None = Field(
        None,
        min_length=1,
        repr=False,
        description="a session token, together with accessKeyId and secretAccessKey",
    )
    starting_position: Place = Field(Place("TRIM_HORIZON"), description=_POSITIONS)
    ending_position: Place = Field(
        Place("LATEST"), description=_POSITIONS.replace("TRIM_HORIZON, ", "")
    )
    max_records_per_trigger: int | None = Field(
        None, ge=1, le=MAX_NUMBER, description="a whole number of records, 1 or more"
    )
    max_bytes_per_trigger: int = Field(
        64 * MEBIBYTE,
        ge=1,
        le=MAX_BYTES,
        description="a size such as 64m, or a whole number of bytes, 1 or more",
    )
    max_records_per_shard_per_trigger: int | None = Field(
        None, ge=1, le=MAX_NUMBER, description="a whole number of records, 1 or more"
    )
    max_records_per_fetch: int = Field(
        10_000,
        ge=1,
        le=10_000,
        description="a whole number of records, 1 to 10000 (one GetRecords call)",
    )
    prefetch_max_bytes: int = Field(
        64 * MEBIBYTE, ge=MEBIBYTE, le=MAX_BYTES, description="a size of 1m to 1024g"
    )
    fetch_threads: int = Field(4, ge=1, le=256, description="a whole number of threads, 1 to 256")
    idle_time_between_reads_in_millis: int = Field(
        1_000,
        ge=200,
        le=MAX_NUMBER,
        description="milliseconds, 200 or more (a shard allows five calls a second)",
    )
    retry_timeout_in_millis: int = Field(
        60_000, ge=1_000, le=MAX_NUMBER, description="milliseconds, 1000 or more"
    )
    fail_on_data_loss: bool = Field(True, description="true or false")

    @field_validator("max_bytes_per_trigger", "prefetch_max_bytes", mode="before")
    @classmethod
    def _size(cls, value: object) -> object:
        match = _SIZE.match(value) if isinstance(value, str) else None
        return int(match[1]) * _UNITS[match[2].lower()] if match else value

    @field_validator("starting_position", "ending_position", mode="before")
    @classmethod
    def _place(cls, value: object) -> object:
        return parse_place(value) if isinstance(value, str) else value

    @property
    def streams(self) -> tuple[str, ...]:
        """Names and ARNs, in the order written."""
        return tuple(
            part.strip()
            for part in (self.stream_name or self.stream_arn or "").split(",")
            if part.strip()
        )

    @property
    def retrieval(self) -> RetrievalSettings:
        """The reader's settings."""
        return RetrievalSettings(
            max_records=self.max_records_per_fetch,
            idle_time_between_reads_in_millis=self.idle_time_between_reads_in_millis,
            prefetch_max_bytes=self.prefetch_max_bytes,
            fetch_threads=self.fetch_threads,
        )

    @property
    def consumer(self) -> ConsumerSettings:
        """The settings that the AWS clients need. A query has no leases."""
        return ConsumerSettings(
            application_name="spark-data-source", streams=self.streams, retrieval=self.retrieval
        )


def parse_options(given: Mapping[str, str]) -> SourceOptions:
    """Parse the options of a reader.

    Raises:
        SettingsError: One sentence with the option, its value, and what to write instead.
    """
    names = {
        field.alias.lower(): field.alias
        for field in SourceOptions.model_fields.values()
        if field.alias is not None
    }
    known: dict[str, Any] = {}
    for name, value in given.items():
        if name.lower() not in names:
            raise SettingsError(_unknown(name, value, names))
        known[names[name.lower()]] = value
    try:
        options = SourceOptions.model_validate(known)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        raise SettingsError(
            _wrong(str(detail["loc"][0]), known, detail.get("ctx", {}).get("error"))
        ) from None
    _check_together(options)
    return options


def check_mode(options: SourceOptions, given: Mapping[str, str], mode: Mode) -> None:
    """Check that the options apply to `spark.read` ("batch") or `spark.readStream` ("stream").

    Raises:
        SettingsError: An option belongs to the other mode.
    """
    names = {name.lower() for name in given}
    if mode == "stream" and "endingposition" in names:
        raise SettingsError(
            "option endingPosition is for spark.read; remove it, or write "
            "trigger(availableNow=True) to end the stream"
        )
    if mode == "batch":
        for name in map(to_camel, _ONLY_STREAM):
            if name.lower() in names:
                raise SettingsError(
                    f"option {name} is for spark.readStream; remove it, or limit a batch "
                    "by endingPosition"
                )
        if options.starting_position.kind == "LATEST":
            raise SettingsError(
                "option startingPosition='LATEST' leaves nothing to read for spark.read; "
                "write TRIM_HORIZON, a timestamp or offsets"
            )


def parse_place(text: str) -> Place:
    """Parse a position option.

    Raises:
        ValueError: The text is not a position. The message is empty if the option's description
            is sufficient.
    """
    stripped = text.strip()
    if stripped.startswith("{"):
        try:
            return Place("OFFSETS", offsets=offset_from_json(json.loads(stripped)))
        except json.JSONDecodeError as error:
            raise ValueError(f"it is not JSON ({error})") from None
    kind, _, rest = stripped.partition(" ")
    upper = kind.upper()
    if upper in {"TRIM_HORIZON", "LATEST"} and not rest:
        return Place("TRIM_HORIZON" if upper == "TRIM_HORIZON" else "LATEST")
    if upper != "AT_TIMESTAMP" or not rest:
        raise ValueError
    try:
        moment = datetime.fromisoformat(rest.strip())
    except ValueError:
        raise ValueError(f"{rest.strip()!r} is not an ISO 8601 time") from None
    if moment.tzinfo is None:
        raise ValueError(f"{rest.strip()!r} has no time zone")
    return Place("AT_TIMESTAMP", timestamp=moment.astimezone(UTC))


def _unknown(name: str, value: str, names: Mapping[str, str]) -> str:
    if name.lower() == "path":
        return (
            f"load({value!r}) names a path, which format('kinesis') does not have; write "
            f"option('streamName', {value!r}) and load()"
        )
    advice = suggestion(name, names.values())
    return f"option {printable(name)}={shown(value, name)} is not known. {advice}"


def _wrong(name: str, given: Mapping[str, Any], reason: object) -> str:
    field = next(f for key, f in SourceOptions.model_fields.items() if name in (key, f.alias))
    value = "…" if name in _SECRET else shown(given.get(name), name)
    why = f" ({printable(str(reason))})" if reason is not None and str(reason) else ""
    return f"option {name}={value} cannot be used{why}. Write {field.description}."


def _check_together(options: SourceOptions) -> None:
    if (options.stream_name is None) == (options.stream_arn is None):
        which = (
            "neither streamName nor streamArn is set"
            if options.stream_name is None
            else "streamName and streamArn are both set"
        )
        raise SettingsError(
            f"{which}; write option('streamName', …) with the stream's name or ARN, several "
            "separated by commas"
        )
    if not options.streams or len(set(options.streams)) != len(options.streams):
        raise SettingsError(
            f"option streamName={options.stream_name or options.stream_arn!r} names no "
            "stream, or one twice; name each once"
        )
    for name in options.streams:
        if not is_stream(name):
            given = options.stream_name or options.stream_arn
            raise SettingsError(
                f"option streamName={shown(given)} has {shown(name)}, which is no stream. "
                f"Write {STREAM_FORMS}."
            )
    if (options.access_key_id is None) != (options.secret_access_key is None):
        missing = "secretAccessKey" if options.secret_access_key is None else "accessKeyId"
        raise SettingsError(
            f"option {missing} is not set; write both accessKeyId and secretAccessKey, or neither"
        )
    if options.ending_position.kind == "TRIM_HORIZON":
        raise SettingsError(
            "option endingPosition='TRIM_HORIZON' would end before the first record; write "
            "LATEST, a timestamp or offsets"
        )
