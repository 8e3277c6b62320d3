"""Every error that the package raises on purpose.

::

    KclError
    ├── SettingsError               a wrong setting, its value and what to write instead
    ├── NotACompatibleTable         rows that must not be worked on (other layout, KCL 2.x)
    │   └── OtherApplicationError   rows of an application with other streams or another sink
    ├── ApplicationInUseError       workers run that a change of the application needs stopped
    ├── AwsError                    AWS refused a call, other than by a condition
    │   ├── Throttled               try later
    │   ├── Unavailable             network, time-out, 5xx: the call may have been applied
    │   ├── AccessDenied            a permission is missing: the message names the action
    │   ├── NotFound                the table or stream does not exist
    │   ├── StreamReplacedError     another stream has the name now
    │   ├── InvalidRequest          anything else the service refused
    │   ├── ExpiredIterator         a shard iterator is too old
    │   └── UnreadableRow           a row of one of the tables cannot be read
    ├── ShardSyncError              the shard list cannot be used (hole, inconsistent)
    ├── RecordsLost                 records that were to be read have left retention
    ├── LeaseLost                   the lease is not ours any more: nothing may be written for it
    ├── TransformFailed             the user's transform raised
    │   └── BrokenTransformError    it cannot work on any record
    └── SinkError                   the sink failed in a way that is not a refusal
        └── CommitStoppedError      the worker stopped between two attempts to commit
"""

from __future__ import annotations


class KclError(Exception):
    """Base of all errors of this package."""


class SettingsError(KclError):
    """A setting is wrong; the message says which, what it was, and what to write instead."""


# a sentence about the table reads better than an Error suffix
class IncompatibleTableError(KclError):
    """The DynamoDB rows belong to a layout or client version that must not be touched."""


class OtherApplicationError(IncompatibleTableError):
    """The tables belong to an application with other streams, another sink or the other mode."""


class ApplicationInUseError(KclError):
    """A change that needs all workers to be stopped finds one, or another change, under way."""


class AwsError(KclError):
    """AWS refused or failed a call.

    `code` is the service's error code, `operation` its API name.
    """

    def __init__(self, message: str, *, code: str = "", operation: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.operation = operation


class ThrottledError(AwsError):
    """The service asked to slow down; nothing was applied."""


class UnavailableError(AwsError):
    """Network, time-out or 5xx: the outcome of a write is unknown."""


class AccessDeniedError(AwsError):
    """The credentials may not do this; the message names the action."""


class NotFoundError(AwsError):
    """The table or stream does not exist."""


class StreamReplacedError(AwsError):
    """The name belongs to another stream than the one that the leases are about."""


class InvalidRequestError(AwsError):
    """The service refused the request for good."""


class ExpiredIteratorError(AwsError):
    """A shard iterator is older than five minutes, or not one the service accepts."""


class UnreadableRowError(AwsError, ValueError):
    """A row has an attribute missing, or of another type, or with a value that means nothing;
    the reader leaves it alone and reports it.
    """


class ShardSyncError(KclError):
    """The list of shards is not usable now; try again later."""


class RecordsLostError(KclError):
    """Records that were to be read have left retention, or their shard is gone; the message names
    shard and positions.
    """


class LeaseLostError(KclError):
    """The lease belongs to somebody else; nothing may be written for it any more."""


class TransformFailedError(KclError):
    """The user's transform raised; the cause is chained.

    `detail` says what, in one line, without naming how many records it was given.
    """

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail or message


class BrokenTransformError(TransformFailedError):
    """The transform cannot work on any record: it does not return a table, for example."""


class SinkError(KclError):
    """The sink failed; whether the batch landed must be read from the table."""


class TableMismatchError(SinkError):
    """The table and the batch, or the sink's settings, do not fit.

    This attempt has written nothing, and another one changes nothing: somebody has to change the
    table, the transform or the settings.
    """


class CommitStoppedError(SinkError):
    """The worker was asked to stop between two attempts to prepare or commit a batch.

    Whether the batch landed is found by the next owner of its leases.
    """
