"""The errors that this package raises.

::

    KclError
    ├── SettingsError                a setting is wrong
    ├── IncompatibleTableError       rows of another layout or client version
    │   └── OtherApplicationError    rows of an application with other streams or another sink
    ├── ApplicationPausedError       the application is paused; no worker starts
    ├── ApplicationInUseError        a change of the application needs all workers stopped
    ├── AwsError                     an AWS call was refused or failed
    │   ├── ThrottledError           too many calls; nothing was applied
    │   ├── UnavailableError         network, time-out, 5xx; the call may have been applied
    │   ├── AccessDeniedError        a permission is missing
    │   ├── NotFoundError            the table or stream does not exist
    │   ├── StreamReplacedError      another stream has the name now
    │   ├── InvalidRequestError      the service refuses the request always
    │   ├── ExpiredIteratorError     the shard iterator is not valid any more
    │   └── UnreadableRowError       a row of one of the tables cannot be read
    ├── ShardSyncError               the list of shards cannot be used now
    ├── RecordsLostError             records have left retention before they were read
    ├── LeaseLostError               another worker owns the lease
    ├── TransformFailedError         the user's transform, or the function of the sink, raised
    │   ├── BrokenTransformError     the transform cannot process any record
    │   └── ResultMismatchError      the columns of its result do not fit the table
    └── SinkError                    the sink failed; the outcome may be unknown
        ├── OtherTableError          the table was replaced or restored to an older state
        ├── TableMismatchError       the table does not fit the batch or the settings
        └── CommitStoppedError       the worker stopped between two attempts to commit
"""

from __future__ import annotations

from typing import Final


class KclError(Exception):
    """Base of all errors of this package.

    Example:
        >>> from kcl_pipeline import KclError
        >>> try:
        ...     raise KclError("the reason")
        ... except KclError as error:
        ...     print(error)
        the reason
    """


class WorkerIdTakenError(KclError):
    """Another process has started under the worker id of this one.

    Attributes:
        other_run_id: The run id of the other process. None: its row has none.

    Example:
        >>> from kcl_pipeline import KclError, WorkerIdTakenError
        >>> try:
        ...     raise WorkerIdTakenError("another process has the id w-1", "host-2@1")
        ... except KclError as error:
        ...     print(error)
        another process has the id w-1
    """

    def __init__(self, text: str, other_run_id: str | None) -> None:
        super().__init__(text)
        self.other_run_id = other_run_id


class SettingsError(KclError):
    """A setting is wrong. The message names it, its value, and what to write instead.

    Example:
        >>> from kcl_pipeline import KclError, SettingsError
        >>> try:
        ...     raise SettingsError("name=3 is not a string. Write a name.")
        ... except KclError as error:
        ...     print(error)
        name=3 is not a string. Write a name.
    """


class IncompatibleTableError(KclError):
    """The rows in DynamoDB have a layout or client version that this package must not change.

    Example:
        >>> from kcl_pipeline import IncompatibleTableError, KclError
        >>> try:
        ...     raise IncompatibleTableError("the reason")
        ... except KclError as error:
        ...     print(error)
        the reason
    """


class OtherApplicationError(IncompatibleTableError):
    """The tables belong to an application with other streams, another sink or the other mode.

    Example:
        >>> from kcl_pipeline import IncompatibleTableError, OtherApplicationError
        >>> try:
        ...     raise OtherApplicationError("the reason")
        ... except IncompatibleTableError as error:
        ...     print(error)
        the reason
    """


class ApplicationPausedError(KclError):
    """An operator has paused the application. The message says since when, who and why.

    Example:
        >>> from kcl_pipeline import ApplicationPausedError, KclError
        >>> try:
        ...     raise ApplicationPausedError("the reason")
        ... except KclError as error:
        ...     print(error)
        the reason
    """


class ApplicationInUseError(KclError):
    """A change of the application needs all workers stopped, but one or another change runs.

    Example:
        >>> from kcl_pipeline import ApplicationInUseError, KclError
        >>> try:
        ...     raise ApplicationInUseError("the reason")
        ... except KclError as error:
        ...     print(error)
        the reason
    """


class AwsError(KclError):
    """An AWS call was refused or failed.

    Attributes:
        code: Error code of the service.
        operation: Name of the API operation.

    Example:
        >>> from kcl_pipeline import AwsError, KclError
        >>> try:
        ...     raise AwsError("the reason")
        ... except KclError as error:
        ...     print(error)
        the reason
    """

    def __init__(self, message: str, *, code: str = "", operation: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.operation = operation


class ThrottledError(AwsError):
    """The service throttled the call. Nothing was applied.

    Example:
        >>> from kcl_pipeline import AwsError, ThrottledError
        >>> try:
        ...     raise ThrottledError("the reason")
        ... except AwsError as error:
        ...     print(error)
        the reason
    """


class UnavailableError(AwsError):
    """Network error, time-out or 5xx. The outcome of a write is unknown.

    Example:
        >>> from kcl_pipeline import AwsError, UnavailableError
        >>> try:
        ...     raise UnavailableError("the reason")
        ... except AwsError as error:
        ...     print(error)
        the reason
    """


class AccessDeniedError(AwsError):
    """The credentials do not allow the call. The message names the action.

    Example:
        >>> from kcl_pipeline import AccessDeniedError, AwsError
        >>> try:
        ...     raise AccessDeniedError("the reason")
        ... except AwsError as error:
        ...     print(error)
        the reason
    """


class NotFoundError(AwsError):
    """The table or stream does not exist.

    Example:
        >>> from kcl_pipeline import AwsError, NotFoundError
        >>> try:
        ...     raise NotFoundError("the reason")
        ... except AwsError as error:
        ...     print(error)
        the reason
    """


class StreamReplacedError(AwsError):
    """The name of the stream now belongs to another stream than that of the leases.

    Example:
        >>> from kcl_pipeline import AwsError, StreamReplacedError
        >>> try:
        ...     raise StreamReplacedError("the reason")
        ... except AwsError as error:
        ...     print(error)
        the reason
    """


class InvalidRequestError(AwsError):
    """The service refused the request, and would refuse it again.

    Example:
        >>> from kcl_pipeline import AwsError, InvalidRequestError
        >>> try:
        ...     raise InvalidRequestError("the reason")
        ... except AwsError as error:
        ...     print(error)
        the reason
    """


class ExpiredIteratorError(AwsError):
    """A shard iterator is older than five minutes, or the service does not accept it.

    Example:
        >>> from kcl_pipeline import AwsError, ExpiredIteratorError
        >>> try:
        ...     raise ExpiredIteratorError("the reason")
        ... except AwsError as error:
        ...     print(error)
        the reason
    """


class UnreadableRowError(AwsError, ValueError):
    """An attribute of a row is missing, has another type, or has an invalid value.

    The reader reports the row and does not change it.

    Example:
        >>> from kcl_pipeline import AwsError, UnreadableRowError
        >>> try:
        ...     raise UnreadableRowError("the reason")
        ... except AwsError as error:
        ...     print(error)
        the reason
    """


class ShardSyncError(KclError):
    """The list of shards cannot be used now. A later attempt may succeed.

    Example:
        >>> from kcl_pipeline import KclError, ShardSyncError
        >>> try:
        ...     raise ShardSyncError("the reason")
        ... except KclError as error:
        ...     print(error)
        the reason
    """


STREAM_ERRORS: Final = (AccessDeniedError, InvalidRequestError, NotFoundError)
"""Errors of one stream that a retry does not end soon: it is missing, being created or deleted, or
forbidden. The other streams of the application are read on.
"""
STREAM_OPERATIONS: Final = frozenset({"DescribeStreamSummary", "ListShards"})
"""The calls about a stream that a leader makes."""


class RecordsLostError(KclError):
    """Records have left retention before they were read, or their shard does not exist any more.

    The message names the shard and the positions.

    Example:
        >>> from kcl_pipeline import KclError, RecordsLostError
        >>> try:
        ...     raise RecordsLostError("the reason")
        ... except KclError as error:
        ...     print(error)
        the reason
    """


class LeaseLostError(KclError):
    """Another worker owns the lease. This worker must not write for it any more.

    Example:
        >>> from kcl_pipeline import KclError, LeaseLostError
        >>> try:
        ...     raise LeaseLostError("the reason")
        ... except KclError as error:
        ...     print(error)
        the reason
    """


class TransformFailedError(KclError):
    """The user's transform, or the function of the sink, raised. The cause is chained.

    Attributes:
        detail: The error in one line, without the number of records.

    Example:
        >>> from kcl_pipeline import KclError, TransformFailedError
        >>> try:
        ...     raise TransformFailedError("the reason")
        ... except KclError as error:
        ...     print(error)
        the reason
    """

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail or message


class BrokenTransformError(TransformFailedError):
    """The transform cannot process any record. For example, it does not return a table.

    Example:
        >>> from kcl_pipeline import BrokenTransformError, TransformFailedError
        >>> try:
        ...     raise BrokenTransformError("the reason")
        ... except TransformFailedError as error:
        ...     print(error)
        the reason
    """


class ResultMismatchError(TransformFailedError):
    """The columns of the transform's result do not fit the table, whatever their values are.

    If this holds for each record of a batch, its shards pause until the transform or the table is
    changed. If it holds for some, these become dead letters.

    Example:
        >>> from kcl_pipeline import ResultMismatchError, TransformFailedError
        >>> try:
        ...     raise ResultMismatchError("the reason")
        ... except TransformFailedError as error:
        ...     print(error)
        the reason
    """


class SinkError(KclError):
    """The sink failed. Whether the batch landed must be read from the table.

    Example:
        >>> from kcl_pipeline import KclError, SinkError
        >>> try:
        ...     raise SinkError("the reason")
        ... except KclError as error:
        ...     print(error)
        the reason
    """


class OtherTableError(SinkError):
    """The table of the sink was replaced, or restored to an older state.

    Or it stores the position of a shard, and this worker does not use positions.

    The lease stands still until a person decides. The message says how.

    Example:
        >>> from kcl_pipeline import OtherTableError, SinkError
        >>> try:
        ...     raise OtherTableError("the reason")
        ... except SinkError as error:
        ...     print(error)
        the reason
    """


class TableMismatchError(SinkError):
    """The table does not fit the batch or the settings of the sink.

    Nothing was written, and a retry does not help. A user has to change the table, the transform or
    the settings.

    Example:
        >>> from kcl_pipeline import SinkError, TableMismatchError
        >>> try:
        ...     raise TableMismatchError("the reason")
        ... except SinkError as error:
        ...     print(error)
        the reason
    """


class CommitStoppedError(SinkError):
    """The worker was stopped between two attempts to read again or commit a batch.

    The next owner of its leases finds out whether the batch landed.

    Example:
        >>> from kcl_pipeline import CommitStoppedError, SinkError
        >>> try:
        ...     raise CommitStoppedError("the reason")
        ... except SinkError as error:
        ...     print(error)
        the reason
    """
