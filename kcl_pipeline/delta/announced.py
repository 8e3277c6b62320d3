"""Find and delete the announcements of one application.

An announced batch that is not committed yet could be committed later, by a worker of another
application that writes to the same table. After the deletion nobody can commit it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kcl_pipeline.delta.errors import delta_errors
from kcl_pipeline.delta.storage.storage import open_storage, table_root
from kcl_pipeline.sinks.announcements import (
    FOLDER,
    MAX_ANNOUNCEMENT_BYTES,
    AnnouncementError,
    decoded,
    is_announcement,
)


@dataclass(frozen=True, slots=True)
class Announced:
    """The announcements of an application in one table.

    Attributes:
        names: Object names of its announcements, sorted.
        unknown: Number of objects whose application cannot be read. They stay until vacuum.
    """

    names: tuple[str, ...] = ()
    unknown: int = 0


class AnnouncementRemoval:
    """The announcements of one application in one table.

    Args:
        uri: Address of the table.
        application_name: The application.
        storage_options: Options of delta-rs.
    """

    def __init__(
        self, uri: str, application_name: str, storage_options: Mapping[str, str] | None = None
    ) -> None:
        self.uri = table_root(uri)
        self._prefix = f"{application_name}/"
        self._options = storage_options
        self._storage = open_storage(self.uri, storage_options)

    def find(self) -> Announced:
        """List and read the announcements.

        Raises:
            SinkError: The table's folder cannot be read.
        """
        names: list[str] = []
        with delta_errors(f"could not read the announcements of {self.uri}", self._options):
            paths = [one.path for one in self._storage.list(FOLDER)]
            valid = [path.removeprefix(f"{FOLDER}/") for path in paths if is_announcement(path)]
            unknown = len(paths) - len(valid)
            found = self._storage.read_each(FOLDER, valid, MAX_ANNOUNCEMENT_BYTES)
            for path, data in found if valid else ():
                if isinstance(data, FileNotFoundError):  # committed and deleted since
                    continue
                owns = self._owns(path, data) if isinstance(data, bytes) else None
                if owns is None:
                    unknown += 1
                elif owns:
                    names.append(path)
        return Announced(tuple(sorted(names)), unknown)

    def delete(self, names: Iterable[str]) -> None:
        """Delete announcements. One that does not exist any more is no error.

        Raises:
            SinkError: One cannot be deleted.
        """
        with delta_errors(f"could not delete an announcement of {self.uri}", self._options):
            for name in names:
                self._storage.delete(name)

    def _owns(self, path: str, data: bytes) -> bool | None:
        """Return whether all shards are of the application. None: it cannot be read."""
        try:
            batch = decoded(data, path)
        except AnnouncementError:
            return None
        return all(one.key.startswith(self._prefix) for one in batch.entries)
