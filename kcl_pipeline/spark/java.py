"""Check before Spark starts that a suitable Java exists.

Spark's own error would be long. This module does not need pyspark, so that the command line can
check Java before heavy imports.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from kcl_pipeline.errors import SettingsError

MINIMUM_JAVA: Final = 17
_HINT: Final = (
    "install one (Debian/Ubuntu: openjdk-17-jre-headless; Fedora: java-17-openjdk-headless; "
    "macOS: brew install openjdk@17) "
    "and, if it is not on PATH, set JAVA_HOME"
)
_VERSION: Final = re.compile(r'version "(?P<major>\d+)(?:\.(?P<minor>\d+))?')


def java_command() -> str | None:
    """The `java` command that Spark would start; None without one.

    It is `$JAVA_HOME/bin/java` if JAVA_HOME is set, otherwise the first one on PATH.

    Example:
        >>> from kcl_pipeline import java_command
        >>> has_java = java_command() is not None
    """
    home = os.environ.get("JAVA_HOME")
    if not home:
        return shutil.which("java")
    command = Path(home) / "bin" / "java"
    return str(command) if os.access(command, os.X_OK) else None


def java_version(command: str | None = None) -> int | None:
    """The major version of `command` (default: `java_command()`). Version 1.8 counts as 8.

    None if the command cannot be run or prints no version.
    """
    command = command or java_command()
    if command is None:
        return None
    try:
        result = subprocess.run(  # noqa: S603 (the command is Spark's own java)
            [command, "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(result.stderr + result.stdout)
    if match is None:
        return None
    major = int(match["major"])
    return int(match["minor"] or 0) if major == 1 else major


def require_java() -> int:
    """The major version of the Java that Spark would use.

    Raises:
        SettingsError: There is no Java, or it is older than 17.
    """
    command = java_command()
    version = java_version(command) if command else None
    if version is None:
        home = os.environ.get("JAVA_HOME")
        where = f"under JAVA_HOME={home}" if home else "on PATH"
        raise SettingsError(
            f"Spark needs Java {MINIMUM_JAVA} or newer and there is no usable java {where}: {_HINT}"
        )
    if version < MINIMUM_JAVA:
        raise SettingsError(
            f"Spark needs Java {MINIMUM_JAVA} or newer and {command} is Java {version}: {_HINT}"
        )
    return version


def require_user_name() -> None:
    """Check that the user id of this process has a name, which Hadoop's login needs.

    Its own error is a stack trace with "Invalid UID, could not determine effective user". No
    variable of the environment replaces the name.

    Raises:
        SettingsError: The user id has no entry in the user database of this host.
    """
    if sys.platform == "win32":
        return
    import pwd  # noqa: PLC0415 (POSIX only)

    user_id = os.geteuid()
    try:
        pwd.getpwuid(user_id)
    except KeyError:
        raise SettingsError(
            f"the user id {user_id} of this process has no entry in /etc/passwd, and Spark cannot "
            f"start without a user name: add the user to the image (useradd --uid {user_id} "
            "worker), run as a user of the image, or write transform_arrow=, which needs no Spark"
        ) from None


def main() -> int:
    """Check Java for the Makefile and return the exit code.

    Prints one line with advice if Java is missing or too old.
    """
    try:
        require_java()
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
