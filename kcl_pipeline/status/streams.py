"""Compare the names of streams in settings with the streams in lease keys."""

from collections.abc import Iterable


def stream_name(name_or_arn: str) -> str:
    """The name of a stream that is given by name or ARN."""
    return name_or_arn.rsplit("/", 1)[-1] if name_or_arn.startswith("arn:") else name_or_arn


def account_of(name_or_arn: str) -> str | None:
    """The account in an ARN. None: it is a name, or has no account."""
    parts = name_or_arn.split(":")
    return parts[4] if name_or_arn.startswith("arn:") and len(parts) > 4 else None  # noqa: PLR2004


def is_lease_stream(name_or_arn: str, serialized: str, others: Iterable[str]) -> bool:
    """Whether the stream of a lease (`account:name:epoch`) is the one with this name or ARN.

    A name without an account is not a stream that `others` has by its ARN.
    """
    account, _, rest = serialized.partition(":")
    if rest.rpartition(":")[0] != stream_name(name_or_arn):
        return False
    named = account_of(name_or_arn)
    if named is not None:
        return named == account
    name = stream_name(name_or_arn)
    return account not in {account_of(one) for one in others if stream_name(one) == name}
