"""The boto3 configurations: time-outs, retries, connections, user agent."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from botocore.config import Config

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.version import __version__

CONNECT_TIMEOUT_SECONDS: Final = 5.0
MIN_TIMEOUT_SECONDS: Final = 5.0
"""Lower limit of time-outs that follow from the renewal interval. A busy host needs that long.

It is half of the default failover time, so that a renewal that hung can be repeated in time.
"""

CLOUDWATCH_TIMEOUT_SECONDS: Final = 5.0
SPARE_CONNECTIONS: Final = 4
LEADER_THREADS: Final = 8
LEADER_CONNECTIONS: Final = LEADER_THREADS + SPARE_CONNECTIONS
SUBSCRIPTION_CONNECTIONS: Final = 256

_Client = TypeVar("_Client", bound=Any)


def user_agent(settings: ConsumerSettings) -> str:
    """Return the part of the user agent that names this application in the logs of AWS."""
    return f"kcl-pipeline/{__version__} kcl-application/{settings.application_name}"


def dynamodb_config(settings: ConsumerSettings) -> Config:
    """Return the boto3 configuration of DynamoDB, with the time-outs of the lease settings.

    A call that hangs ends soon enough for the lease to be renewed again before it expires. One
    attempt: a retried conditional write would be refused because of its own first attempt
    (protocol §1.4.1).
    """
    lease = settings.lease
    seconds = min(
        lease.dynamo_db_request_timeout_millis / 1000,
        max(lease.renewal_interval_millis / 1000, MIN_TIMEOUT_SECONDS),
    )
    return Config(
        user_agent_extra=user_agent(settings),
        connect_timeout=min(CONNECT_TIMEOUT_SECONDS, seconds),
        read_timeout=seconds,
        retries={"total_max_attempts": 1, "mode": "standard"},
        # twice: renewals and other writes
        max_pool_connections=2 * lease.max_lease_renewal_threads + LEADER_CONNECTIONS,
        tcp_keepalive=True,
    )


def kinesis_config(settings: ConsumerSettings) -> Config:
    """Return the boto3 configuration of Kinesis, with the time-outs of the retrieval settings.

    One attempt: the reader backs off by itself and counts every call against the shard's limits.
    """
    return Config(
        user_agent_extra=user_agent(settings),
        connect_timeout=CONNECT_TIMEOUT_SECONDS,
        read_timeout=settings.retrieval.kinesis_request_timeout_millis / 1000,
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=settings.retrieval.fetch_threads + SPARE_CONNECTIONS,
        tcp_keepalive=True,
    )


def fan_out_config(settings: ConsumerSettings) -> Config:
    """Return the boto3 configuration of subscriptions.

    The read time-out is at least `fan_out_stall_millis`, so that the watchdog decides first.
    """
    retrieval = settings.retrieval
    seconds = max(retrieval.kinesis_request_timeout_millis, retrieval.fan_out_stall_millis) / 1000
    return kinesis_config(settings).merge(
        Config(read_timeout=seconds, max_pool_connections=SUBSCRIPTION_CONNECTIONS)
    )


def cloudwatch_config(settings: ConsumerSettings) -> Config:
    """Return the boto3 configuration of CloudWatch. A call takes five seconds, as in KCL."""
    return Config(
        user_agent_extra=user_agent(settings),
        connect_timeout=CONNECT_TIMEOUT_SECONDS,
        read_timeout=CLOUDWATCH_TIMEOUT_SECONDS,
        retries={"total_max_attempts": 2, "mode": "standard"},
    )


def without_proxy(make: Callable[[Config], _Client], config: Config) -> _Client:
    """Create a boto3 client, which uses no proxy if its endpoint is on this host.

    The proxy of `HTTP_PROXY` runs on another host, so it cannot reach 127.0.0.1 of this one. The
    endpoint is known only afterwards: it may come from the environment or a profile.

    Args:
        make: Creates the client of a configuration.
        config: The configuration.
    """
    client = make(config)
    if not getproxies() or not _is_loopback(client.meta.endpoint_url):
        return client
    client.close()
    return make(config.merge(Config(proxies={})))


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
