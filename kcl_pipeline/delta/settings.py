"""Define and validate the settings of a Delta sink."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kcl_pipeline.arguments import (
    check_flag,
    check_options,
    check_text,
    check_texts,
    checked_arguments,
)
from kcl_pipeline.delta.storage import StorageOptions, check_path, table_root
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.settings_errors import names_only, without_credentials

_USER: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://(?P<user>[^/@?]*)@")
_QUERY: Final = re.compile(r"(?!file:)[A-Za-z][A-Za-z0-9+.-]+://[^?]*\?")
_CONTAINER_SCHEMES: Final = ("abfs:", "abfss:", "wasb:", "wasbs:")
"""Azure's addresses have the container before the @."""


def check_address(name: str, uri: str | None) -> None:
    """Refuse an address of a table that contains credentials: errors and logs name addresses.

    Raises:
        SettingsError: It has a user, a password or a query, or see `check_path`.
    """
    if uri is None:
        return
    user = _USER.match(uri)
    is_container = uri.startswith(_CONTAINER_SCHEMES) and user is not None and ":" not in user[1]
    if (user is not None and not is_container) or _QUERY.match(uri):
        what = "a user or a password" if user is not None and not is_container else "a query"
        raise SettingsError(
            f"{name}={without_credentials(uri)} contains {what}, which logs would show. Write the "
            "credentials into storage_options."
        )
    check_path(name, uri)


@checked_arguments
@dataclass(frozen=True, slots=True)
class DeltaSink:
    """A Delta table to write to.

    Example:
        >>> from kcl_pipeline import DeltaSink
        >>> sink = DeltaSink("s3://lake/orders", partition_by=["day"], schema_evolution=True)

    Raises:
        SettingsError: An argument is invalid.
    """

    uri: str
    """A local path, or the address of an object store.

    Examples are `lake/orders` and `s3://bucket/folder`.
    """
    partition_by: Sequence[str] = ()
    """Columns of the transform's output."""
    storage_options: Mapping[str, str] = field(default_factory=dict)
    """Options of delta-rs (`AWS_ENDPOINT_URL`, `AWS_REGION`, …)."""
    dead_letter_uri: str | None = None
    """Address of the dead-letter table. None means `<uri>_dead_letters`."""
    schema_evolution: bool = False
    """Add columns of the output that the table does not have. Otherwise the batch is refused."""
    table_properties: Mapping[str, str] = field(default_factory=dict)
    """Set when the table is created. Default: `delta.checkpointInterval` 50, because the cost of a
    commit grows with the entries since the last log checkpoint."""
    combined_commits: bool = True
    """A worker that loses the race for a version announces its batch. Workers commit announced
    batches of others together with their own."""

    def __post_init__(self) -> None:
        check_text(
            "DeltaSink uri", self.uri, "Write a path such as '/data/orders' or 's3://lake/orders'"
        )
        check_texts("DeltaSink partition_by", self.partition_by, "Write partition_by=['day']")
        check_text(
            "DeltaSink dead_letter_uri",
            self.dead_letter_uri,
            "Write the address of another Delta table, or None",
            optional=True,
        )
        check_options(
            "DeltaSink storage_options",
            self.storage_options,
            "{'AWS_REGION': 'eu-central-1'}",
            hidden=True,
        )
        check_options(
            "DeltaSink table_properties",
            self.table_properties,
            "{'delta.checkpointInterval': '50'}",
        )
        check_flag("DeltaSink schema_evolution", self.schema_evolution)
        check_flag("DeltaSink combined_commits", self.combined_commits)
        check_address("DeltaSink uri", self.uri)
        check_address("DeltaSink dead_letter_uri", self.dead_letter_uri)
        object.__setattr__(self, "partition_by", tuple(self.partition_by))
        object.__setattr__(self, "storage_options", StorageOptions(self.storage_options))
        if self.dead_letter_uri is not None and table_root(self.dead_letter_uri) == table_root(
            self.uri
        ):
            raise SettingsError(
                f"DeltaSink dead_letter_uri={self.dead_letter_uri} is the table itself. Write "
                f"another, or None for {self.uri}_dead_letters."
            )

    def __repr__(self) -> str:
        return (
            f"DeltaSink(uri={without_credentials(self.uri)!r}, partition_by={self.partition_by!r}, "
            f"storage_options={names_only(self.storage_options)!r}, "
            f"dead_letter_uri={without_credentials(self.dead_letter_uri)!r}, "
            f"schema_evolution={self.schema_evolution!r}, "
            f"table_properties={dict(self.table_properties)!r}, "
            f"combined_commits={self.combined_commits!r})"
        )

    @property
    def dead_letters(self) -> str:
        """Address of the dead-letter table."""
        return self.dead_letter_uri or f"{table_root(self.uri)}_dead_letters"
