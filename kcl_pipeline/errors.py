"""Every error that the package raises on purpose.

KclError
├── SettingsError          a wrong setting: the message names the setting, the value and what to write instead
├── NotACompatibleTable    the rows found are not ones this version may work on (other layout, 2.x application)
├── AwsError               AWS said no, in a way that is not a condition failure
│   ├── Throttled          try later
│   ├── Unavailable        network, time-out, 5xx: the call may or may not have been applied
│   ├── AccessDenied       a permission is missing: the message names the action
│   ├── NotFound           the table or stream does not exist
│   ├── InvalidRequest     anything else the service refused
│   └── UnreadableRow      a row of one of the tables is not what it should be
├── ShardSyncError         the shard list cannot be used as it is (hole, inconsistent, stream not active)
├── RecordsLost            records that were to be read have left retention, or their shard is gone
├── LeaseLost              the lease is not ours any more: nothing may be written for it
├── TransformFailed        the user's transform raised
└── SinkError              the sink failed in a way that is not a refusal
"""

from __future__ import annotations


class KclError(Exception):
    """Base of all errors of this package."""


class SettingsError(KclError):
    """A setting is wrong; the message says which, what it was, and what to write instead."""


class NotACompatibleTable(KclError):  # noqa: N818 (a sentence about the table reads better than an Error suffix)
    """The DynamoDB rows belong to a layout or client version that must not be touched."""


class AwsError(KclError):
    """AWS refused or failed a call. `code` is the service's error code, `operation` its API name."""

    def __init__(self, message: str, *, code: str = "", operation: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.operation = operation


class Throttled(AwsError):  # noqa: N818
    """The service asked to slow down; nothing was applied."""


class Unavailable(AwsError):  # noqa: N818
    """Network, time-out or 5xx: the outcome of a write is unknown."""


class AccessDenied(AwsError):  # noqa: N818
    """The credentials may not do this; the message names the action."""


class NotFound(AwsError):  # noqa: N818
    """The table or stream does not exist."""


class InvalidRequest(AwsError):  # noqa: N818
    """The service refused the request for good."""


class ExpiredIterator(AwsError):  # noqa: N818
    """A shard iterator is older than five minutes, or not one the service accepts."""


class UnreadableRow(AwsError, ValueError):  # noqa: N818
    """A row has an attribute missing, or of another type, or with a value that means nothing; whoever meets it leaves it alone and reports it."""


class ShardSyncError(KclError):
    """The list of shards is not usable now; try again later."""


class RecordsLost(KclError):  # noqa: N818
    """Records that were to be read have left retention, or their shard is gone; the message names shard and positions."""


class LeaseLost(KclError):  # noqa: N818
    """The lease belongs to somebody else; nothing may be written for it any more."""


class TransformFailed(KclError):  # noqa: N818
    """The user's transform raised; the cause is chained."""


class SinkError(KclError):
    """The sink failed; whether the batch landed must be read from the table."""
