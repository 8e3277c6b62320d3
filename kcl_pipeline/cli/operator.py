"""The operator who changes an application from the command line."""

import getpass
import socket

from kcl_pipeline.cli.target import Target
from kcl_pipeline.control.application import ApplicationControl


def operated(app: Target) -> ApplicationControl:
    """The application of a command, changed by the user of this process."""
    tables = app.tables
    return ApplicationControl(
        app.settings, tables.lease, tables.workers, tables.coordinator, app.clock, _user()
    )


def _user() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may have no name for the user id
        user = "user"
    return f"{user}@{socket.gethostname()}"
