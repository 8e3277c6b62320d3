"""Errors of the Kinesis model, with the service's error codes."""

from __future__ import annotations


class KinesisError(Exception):
    """An error of the service.

    `code` is the name that SDKs map to an exception, for example `ResourceNotFoundException`.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


def not_found(message: str) -> KinesisError:
    """The stream, shard or consumer does not exist."""
    return KinesisError("ResourceNotFoundException", message)


def in_use(message: str) -> KinesisError:
    """The resource exists already or is in a state that does not allow the call."""
    return KinesisError("ResourceInUseException", message)


def invalid_argument(message: str) -> KinesisError:
    """An argument is well-formed but wrong for this stream or shard."""
    return KinesisError("InvalidArgumentException", message)


def limit_exceeded(message: str) -> KinesisError:
    """The request exceeds an account limit."""
    return KinesisError("LimitExceededException", message)


def validation(message: str) -> KinesisError:
    """The request is not well-formed."""
    return KinesisError("ValidationException", message)


def constraint(field: str, value: object, rule: str) -> KinesisError:
    """A value violates one constraint; the message is the service's."""
    return validation(
        f"1 validation error detected: Value '{value}' at '{field}' failed to satisfy "
        f"constraint: Member must {rule}"
    )


def throttled(shard_id: str, stream: str, account: str) -> KinesisError:
    """The shard's throughput limit is reached."""
    return KinesisError(
        "ProvisionedThroughputExceededException",
        f"Rate exceeded for shard {shard_id} in stream {stream} under account {account}.",
    )
