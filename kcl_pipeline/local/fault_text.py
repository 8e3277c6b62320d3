"""Fault rules as text, for the command line: `SERVICE.OPERATION:KIND=VALUE`."""

from __future__ import annotations

from typing import Final, get_args

from pydantic import ValidationError

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.local.faults import FaultRule, Kind

KINDS: Final[tuple[str, ...]] = get_args(Kind)
EXAMPLES: Final = "dynamodb.Scan:throttle=0.5, kinesis:delay=0.2 or *:drop_after=0.01"
FAULT_HELP: Final = (
    f"a fault as SERVICE.OPERATION:KIND=VALUE; KIND is one of {', '.join(KINDS)}; VALUE is the "
    "share of calls from 0 to 1, or for delay the seconds"
)


def parse_fault(text: str) -> FaultRule:
    """Parse one rule.

    The value is the share of calls that get the fault, from 0 to 1; without it, all of them. For
    `delay` it is the time in seconds, and all calls are delayed. A missing operation, and `*`,
    match every operation; `*` matches every service.

    Raises:
        SettingsError: The text is not a rule.
    """
    call, colon, fault = text.rpartition(":")
    service, _, operation = call.partition(".")
    kind, equals, value = fault.partition("=")
    if not (colon and service) or kind not in KINDS or (kind == "delay" and not equals):
        raise _refused(text)
    name = "delay_seconds" if kind == "delay" else "probability"
    amount = {name: value} if equals else {}
    try:
        return FaultRule.model_validate(
            {"service": service, "operation": operation or "*", "kind": kind, **amount}
        )
    except (SettingsError, ValidationError) as error:
        raise _refused(text) from error


def _refused(text: str) -> SettingsError:
    return SettingsError(
        f"--fault {text!r} is not SERVICE.OPERATION:KIND=VALUE with a kind of {', '.join(KINDS)}, "
        f"a share from 0 to 1, or seconds for delay; write for example {EXAMPLES}"
    )
