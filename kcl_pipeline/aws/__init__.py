"""Create the AWS session, its clients, the tables and the stream client of an application.

The pipeline, the command line and the Dagster resources all use this module. It alone decides
time-outs, retries and the user agent.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    NoRegionError,
    PartialCredentialsError,
    ProfileNotFound,
)

from kcl_pipeline.arguments import check_flag, checked_arguments
from kcl_pipeline.aws.configs import (
    cloudwatch_config,
    dynamodb_config,
    fan_out_config,
    kinesis_config,
    without_proxy,
)
from kcl_pipeline.aws.credentials import botocore_session
from kcl_pipeline.aws_calls import limit_bodies
from kcl_pipeline.clock import Clock, SystemClock
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.settings_errors import without_credentials, wrong

if TYPE_CHECKING:
    from mypy_boto3_dynamodb import DynamoDBClient
    from mypy_boto3_kinesis import KinesisClient as BotoKinesisClient

    from kcl_pipeline.kinesis.boto import BotoKinesis
    from kcl_pipeline.kinesis.client import KinesisClient
    from kcl_pipeline.kinesis.fan_out.http2 import Http2FanOut
    from kcl_pipeline.kinesis.fan_out.removal import ConsumerRemoval
    from kcl_pipeline.kinesis.fan_out.subscription import FanOutClient
    from kcl_pipeline.leases.deletion import TableDeletion
    from kcl_pipeline.leases.layout import Tables
    from kcl_pipeline.threads import MapCallable

KEPT_CLIENTS: Final = 16
"""Our own limit: more settings and credentials than one process uses at the same time."""

_TEXTS: Final = (
    "region_name",
    "profile_name",
    "endpoint_url",
    "aws_access_key_id",
    "aws_secret_access_key",
    "aws_session_token",
)
_NO_STRING: Final = "is not a string"

_T = TypeVar("_T")


@checked_arguments
@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Region, endpoint and credentials of the AWS session.

    None means: as the standard environment variables, configuration files and instance roles say.

    Attributes:
        region_name: Region of both services.
        profile_name: Profile of the AWS configuration files.
        endpoint_url: Endpoint of both services. It overrides `AWS_ENDPOINT_URL`.
        aws_access_key_id: Set together with the secret access key, or not at all.
        aws_secret_access_key: See `aws_access_key_id`.
        aws_session_token: Session token of temporary credentials.
        use_ssl: False: HTTP instead of HTTPS, where no endpoint is set.
        verify: Whether certificates are verified.

    Raises:
        SettingsError: A value has another type, or characters that do not print.

    Example:
        >>> from kcl_pipeline import SessionOptions
        >>> options = SessionOptions(region_name="eu-central-1", profile_name="lake")
        >>> options.region_name
        'eu-central-1'
    """

    region_name: str | None = None
    profile_name: str | None = None
    endpoint_url: str | None = None
    aws_access_key_id: str | None = None
    aws_secret_access_key: str | None = field(default=None, repr=False)
    aws_session_token: str | None = field(default=None, repr=False)
    use_ssl: bool = True
    verify: bool | None = None

    def __post_init__(self) -> None:
        for name in _TEXTS:
            value: object = getattr(self, name)
            if value is None or (isinstance(value, str) and value.isprintable()):
                continue
            problem = "has characters that do not print" if isinstance(value, str) else _NO_STRING
            raise wrong(f"SessionOptions {name}", value, problem, "Write a string, or None")
        if self.endpoint_url is not None and without_credentials(self.endpoint_url) != (
            self.endpoint_url
        ):
            raise SettingsError(
                f"SessionOptions endpoint_url={without_credentials(self.endpoint_url)} has a user "
                "or a query, which errors would show. Write the scheme, the host and the port."
            )
        check_flag("SessionOptions use_ssl", self.use_ssl)
        if self.verify is not None:
            check_flag("SessionOptions verify", self.verify)


class AwsClients:
    """The boto3 clients of one application, each created on first use. Thread-safe.

    Creating a client calls no service.

    Raises:
        SettingsError: The region, the profile, the endpoint or one key of the pair is missing or
            wrong. Raised by the properties.

    Example:
        >>> from kcl_pipeline import AwsClients
        >>> clients = AwsClients(orders.settings)  # doctest: +SKIP
        >>> orders.ensure_tables(clients=clients)  # doctest: +SKIP
    """

    def __init__(
        self,
        settings: ConsumerSettings,
        options: SessionOptions | None = None,
        *,
        clock: Clock | None = None,
    ) -> None:
        self.options = options or SessionOptions()
        self._settings = settings
        self._lock = (clock or SystemClock()).lock()
        self._session: boto3.Session | None = None
        self._dynamodb: DynamoDBClient | None = None
        self._kinesis: BotoKinesisClient | None = None
        self._fan_out: BotoKinesisClient | None = None
        self._http2_fan_out: Http2FanOut | None = None
        self._cloudwatch: Any = None

    @property
    def dynamodb(self) -> DynamoDBClient:
        """The DynamoDB client. It never retries a call by itself."""
        with self._lock, _as_settings_errors():
            if self._dynamodb is None:
                self._dynamodb = self._client("dynamodb", dynamodb_config(self._settings))
                limit_bodies(self._dynamodb)
            return self._dynamodb

    @property
    def kinesis(self) -> BotoKinesisClient:
        """The Kinesis client, with a connection for every fetch thread."""
        with self._lock, _as_settings_errors():
            if self._kinesis is None:
                self._kinesis = self._client("kinesis", kinesis_config(self._settings))
            return self._kinesis

    @property
    def fan_out(self) -> BotoKinesisClient:
        """The Kinesis client for subscriptions, each of which uses a connection for minutes."""
        with self._lock, _as_settings_errors():
            if self._fan_out is None:
                self._fan_out = self._client("kinesis", fan_out_config(self._settings))
            return self._fan_out

    @property
    def cloudwatch(self) -> Any:
        """The CloudWatch client."""
        with self._lock, _as_settings_errors():
            if self._cloudwatch is None:
                self._cloudwatch = self._client("cloudwatch", cloudwatch_config(self._settings))
            return self._cloudwatch

    @property
    def http2_fan_out(self) -> Http2FanOut:
        """The client for subscriptions over HTTP/2.

        Raises:
            SettingsError: The extra `http2` is not installed.
        """
        from kcl_pipeline.kinesis.fan_out.http2 import Http2FanOut  # noqa: PLC0415 (an extra)

        client = self.fan_out
        with self._lock:
            if self._http2_fan_out is None:
                self._http2_fan_out = Http2FanOut(client)
            return self._http2_fan_out

    @property
    def endpoint_url(self) -> str:
        """Endpoint of DynamoDB."""
        return self.dynamodb.meta.endpoint_url

    @property
    def region_name(self) -> str:
        """The region of both clients."""
        return self.dynamodb.meta.region_name

    def has_credentials(self) -> bool:
        """Whether any source has credentials. This may call the metadata service of the host."""
        with self._lock, _as_settings_errors():
            return self._get_session().get_credentials() is not None

    def close(self) -> None:
        """Close the connections. A later use creates new clients."""
        with self._lock:
            for client in (self._dynamodb, self._kinesis, self._fan_out, self._cloudwatch):
                if client is not None:
                    client.close()
            self._dynamodb = self._kinesis = self._fan_out = self._cloudwatch = None
            http2, self._http2_fan_out = self._http2_fan_out, None
            if http2 is not None:
                http2.close()

    def _client(self, service: Any, config: Config) -> Any:
        def make(config: Config) -> Any:
            return self._get_session().client(
                service,
                endpoint_url=self.options.endpoint_url,
                use_ssl=self.options.use_ssl,
                verify=self.options.verify,
                config=config,
            )

        return without_proxy(make, config)

    def _get_session(self) -> boto3.Session:
        if self._session is None:
            options = self.options
            self._session = boto3.Session(
                aws_access_key_id=options.aws_access_key_id,
                aws_secret_access_key=options.aws_secret_access_key,
                aws_session_token=options.aws_session_token,
                # No profile here: this session has it
                botocore_session=botocore_session(options.profile_name),
                # boto3 reads AWS_DEFAULT_REGION and the profile, but containers and functions
                # have AWS_REGION
                region_name=options.region_name or os.environ.get("AWS_REGION") or None,
            )
        return self._session


class ClientCache(Generic[_T]):
    """The most recently used clients of this process, by settings and credentials. Thread-safe.

    Rotating credentials produce a new key each time, so the least recently used client is removed.
    It is not closed, because its users may still hold it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: dict[tuple[str, SessionOptions], _T] = {}

    def get(
        self, settings: ConsumerSettings, options: SessionOptions, make: Callable[[], _T]
    ) -> _T:
        """Return the client of these settings and options; `make` creates it the first time."""
        key = (settings.model_dump_json(), options)
        with self._lock:
            found = self._made.pop(key) if key in self._made else make()
            self._made[key] = found
            if len(self._made) > KEPT_CLIENTS:
                del self._made[next(iter(self._made))]
            return found


@contextmanager
def _as_settings_errors() -> Iterator[None]:
    try:
        yield
    except NoRegionError as error:
        raise SettingsError(
            "no AWS region is set; set AWS_REGION (the embedded AWS accepts any region, such as "
            "us-east-1)"
        ) from error
    except ProfileNotFound as error:
        raise SettingsError(
            f"{error}; write a profile of ~/.aws/config, or leave it out"
        ) from error
    except PartialCredentialsError as error:
        raise SettingsError(
            f"{error}; set the access key id and the secret access key together"
        ) from error
    except (BotoCoreError, ValueError) as error:
        raise SettingsError(f"the AWS session cannot be created: {error}") from error


def open_tables(
    settings: ConsumerSettings, clients: AwsClients, clock: Clock, *, map_: MapCallable = map
) -> Tables:
    """Return the three tables as objects. This reads no table. `map_` scans several segments."""
    # imported here: the command line starts without the tables
    from kcl_pipeline.leases.dynamodb import open_dynamodb  # noqa: PLC0415

    return open_dynamodb(clients.dynamodb, settings, clock, map_)


@dataclass(frozen=True, slots=True)
class Removals:
    """What deletes the resources of a retired application in AWS.

    Attributes:
        tables: Returns the tables that are deleted first, and the last one, which has the pause.
        consumers: Deletes its fan-out consumers.
    """

    tables: Callable[[], tuple[tuple[TableDeletion, ...], TableDeletion]]
    consumers: ConsumerRemoval


def open_removals(settings: ConsumerSettings, clients: AwsClients, clock: Clock) -> Removals:
    """Return what deletes the tables and the fan-out consumers of an application."""
    # imported here: only the retirement needs them
    from kcl_pipeline.kinesis.fan_out.removal import ConsumerRemoval  # noqa: PLC0415
    from kcl_pipeline.leases.dynamodb import deletions  # noqa: PLC0415

    name = settings.retrieval.consumer_name or settings.application_name
    layout = open_tables(settings, clients, clock).layout
    return Removals(
        lambda: deletions(clients.dynamodb, layout, clock), ConsumerRemoval(clients.kinesis, name)
    )


def delete_tables(clients: AwsClients, names: Iterable[str]) -> None:
    """Delete DynamoDB tables in this order, see `leases.dynamodb`."""
    from kcl_pipeline.leases import dynamodb  # noqa: PLC0415 (as above)

    dynamodb.delete_tables(clients.dynamodb, names)


def open_kinesis(settings: ConsumerSettings, clients: AwsClients, clock: Clock) -> KinesisClient:
    """Return the stream client of this application."""
    # pyarrow is loaded only where records are read
    from kcl_pipeline.kinesis.boto import BotoKinesis  # noqa: PLC0415

    client: type[BotoKinesis] = BotoKinesis
    if settings.retrieval.is_bounded:
        from kcl_pipeline.kinesis.bounded import BoundedKinesis  # noqa: PLC0415 (likewise)

        client = BoundedKinesis
    return client(
        clients.kinesis,
        settings.retrieval,
        settings.shard_sync,
        clock,
        # Not seeded: processes that are throttled together must not retry together
        rng=random.SystemRandom(),
    )


@dataclass(frozen=True, slots=True)
class KinesisSource:
    """Opens the stream client of an application in another process. Can be pickled.

    Each process opens it once. Credentials are pickled only if `options` has them. Otherwise each
    process finds its own.
    """

    settings: ConsumerSettings
    options: SessionOptions

    @classmethod
    def of(cls, settings: ConsumerSettings, clients: AwsClients) -> KinesisSource:
        """Return a source with the region of `clients`, and with its endpoint if one is set."""
        options = clients.options
        endpoint = (
            options.endpoint_url
            or os.environ.get("AWS_ENDPOINT_URL_KINESIS")
            or os.environ.get("AWS_ENDPOINT_URL")
        )
        return cls(
            settings, replace(options, region_name=clients.region_name, endpoint_url=endpoint)
        )

    def open(self) -> KinesisClient:
        """Return the client of this process."""
        return _OPENED.get(
            self.settings,
            self.options,
            lambda: open_kinesis(
                self.settings, AwsClients(self.settings, self.options), SystemClock()
            ),
        )


_OPENED: Final = ClientCache["KinesisClient"]()


def open_fan_out(settings: ConsumerSettings, clients: AwsClients) -> FanOutClient | None:
    """Return the client for subscriptions, or None if the settings poll all shards.

    Raises:
        SettingsError: The settings need the extra `http2`, which is not installed.
    """
    if settings.retrieval.retrieval_mode == "polling":
        return None
    if settings.retrieval.fan_out_http == "2":
        return clients.http2_fan_out
    from kcl_pipeline.kinesis.fan_out.boto import BotoFanOut  # noqa: PLC0415 (it needs pyarrow)

    return BotoFanOut(clients.fan_out)
