"""Command that runs the embedded AWS as a separate process.

Usage: ``python -m kcl_pipeline.local --port P [--enforce-limits] [--fault RULE]``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kcl_pipeline.clock import Clock, StopSignal, SystemClock
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.local.fault_text import FAULT_HELP, parse_fault
from kcl_pipeline.local.faults import FaultRule
from kcl_pipeline.local.server import EmbeddedAws
from kcl_pipeline.signals import stop_on_signals
from kcl_pipeline.testing.kinesis.state import KinesisSettings

_WAIT_SECONDS = 3600.0


def serve(
    settings: KinesisSettings, port: int, stop: StopSignal, faults: Sequence[FaultRule] = ()
) -> None:
    """Serve requests until `stop` is set.

    The function prints one line with the URL when the server is ready.

    Raises:
        OSError: Another process uses the port.
    """
    with EmbeddedAws(port=port, region=settings.region, settings=settings) as aws:
        aws.warm_up()
        aws.fault_rules.replace(list(faults))
        sys.stdout.write(f"{aws.endpoint_url}\n")
        sys.stdout.flush()
        while not stop.wait(_WAIT_SECONDS):
            pass


def main(arguments: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Parse the arguments and serve until SIGTERM or SIGINT.

    Returns:
        The exit code: 0, or 1 when another process uses the port, a
        fault rule is not valid, or the extra `local` is missing.
    """
    parser = argparse.ArgumentParser(
        prog="kcl-pipeline local",
        description="Kinesis, DynamoDB and S3 on 127.0.0.1 (use AWS_ENDPOINT_URL)",
    )
    parser.add_argument(
        "--port", type=int, default=4566, help="0 takes a free one (default: %(default)s)"
    )
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument(
        "--enforce-limits", action="store_true", help="throttle shards as Kinesis does"
    )
    parser.add_argument(
        "--reshard-delay-seconds",
        type=float,
        default=0.0,
        help="how long a stream is UPDATING after a reshard",
    )
    parser.add_argument(
        "--create-delay-seconds", type=float, default=0.0, help="how long a new stream is CREATING"
    )
    parser.add_argument("--fault", action="append", default=[], metavar="RULE", help=FAULT_HELP)
    options = parser.parse_args(arguments)
    stop = (clock if clock is not None else SystemClock()).signal()
    settings = KinesisSettings(
        region=options.region,
        enforce_limits=options.enforce_limits,
        create_delay_seconds=options.create_delay_seconds,
        reshard_delay_seconds=options.reshard_delay_seconds,
    )
    try:
        faults = [parse_fault(text) for text in options.fault]
        with stop_on_signals(stop):
            serve(settings, options.port, stop, faults)
    except OSError as error:
        sys.stderr.write(
            f"cannot listen on 127.0.0.1:{options.port}: {error.strerror}; choose another --port\n"
        )
        return 1
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
