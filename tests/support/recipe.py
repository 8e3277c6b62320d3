"""The recipe of docs/functions.md, on SQLite or on a real PostgreSQL."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "functions.md"
LONGEST_RECIPE = 30
_TABLES = (
    "CREATE TABLE orders (data {bytes})",
    "CREATE TABLE positions (shard TEXT PRIMARY KEY, sequence_number TEXT, sub INT)",
)

WriteOnce = Callable[[Any, Any], None]


def recipe(placeholder: str) -> WriteOnce:
    """The function `write_once` of the page."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (code,) = (block for block in blocks if "def write_once(" in block)
    assert len([line for line in code.splitlines() if line.strip()]) <= LONGEST_RECIPE
    names: dict[str, Any] = {}
    exec(compile(code.replace("?", placeholder), PAGE.name, "exec"), names)
    found: WriteOnce = names["write_once"]
    return found


class Cursor:
    """A cursor of the database. `step` is called before and after each statement."""

    def __init__(self, cursor: Any, step: Callable[[], None]) -> None:
        self._cursor = cursor
        self._step = step

    def execute(self, *given: Any) -> None:
        self._step()
        self._cursor.execute(*given)
        self._step()

    def executemany(self, *given: Any) -> None:
        self._step()
        self._cursor.executemany(*given)
        self._step()

    def fetchall(self) -> list[Any]:
        found: list[Any] = self._cursor.fetchall()
        return found


class Database:
    """A database with the tables of the recipe.

    Args:
        connect: Opens a connection. Its context commits, or rolls back after an error.
        placeholder: Stands for a value in a statement.
        bytes_type: Type of a column of bytes.
    """

    def __init__(self, connect: Callable[[], Any], placeholder: str, bytes_type: str) -> None:
        self._connect = connect
        self._write_once = recipe(placeholder)
        self.step: Callable[[], None] = lambda: None
        with closing(connect()) as database, database:
            for table in _TABLES:
                database.execute(table.format(bytes=bytes_type))

    def write(self, rows: Any, _identity: Any = None) -> None:
        """The user's function."""
        with closing(self._connect()) as database, database:
            self._write_once(Cursor(database.cursor(), self.step), rows)
            self.step()
        self.step()

    def data(self) -> list[bytes]:
        """The rows of `orders`, sorted."""
        with closing(self._connect()) as database:
            return sorted(
                bytes(row[0]) for row in database.execute("SELECT data FROM orders").fetchall()
            )


def sqlite(folder: Path) -> Database:
    """A new database of SQLite."""
    return Database(lambda: sqlite3.connect(folder / "orders.sqlite"), "?", "BLOB")


@contextmanager
def postgres(folder: Path) -> Iterator[Callable[[], Database]]:
    """A server of PostgreSQL on a socket in the folder. Each call makes a new database."""
    import psycopg  # noqa: PLC0415 (`make test-postgres` installs it)

    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin")) or [
        Path(shutil.which("initdb") or "initdb").parent
    ]
    binaries, data = programs[-1], folder / "data"
    user = _other_user(folder)
    made: list[str] = []

    def run(program: str, *given: str) -> None:
        done = subprocess.run(
            [str(binaries / program), "-D", str(data), *given],
            user=user,
            cwd=folder,
            capture_output=program != "pg_ctl",
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def connect(name: str, *, autocommit: bool = False) -> Any:
        return psycopg.connect(
            host=str(folder), user="test", dbname=name, autocommit=autocommit, connect_timeout=30
        )

    def make() -> Database:
        made.append(f"orders_{len(made)}")
        with connect("postgres", autocommit=True) as admin:
            admin.execute(f"CREATE DATABASE {made[-1]}")
        name = made[-1]
        return Database(lambda: connect(name), "%s", "BYTEA")

    run("initdb", "-U", "test", "-A", "trust", "--no-sync")
    options = f"-k {folder} -c listen_addresses='' -c fsync=off"
    run("pg_ctl", "-w", "-l", str(folder / "log"), "-o", options, "start")
    try:
        yield make
    finally:
        run("pg_ctl", "-w", "-m", "immediate", "stop")


def _other_user(folder: Path) -> str | None:
    """The server does not run as root."""
    import os  # noqa: PLC0415
    import pwd  # noqa: PLC0415

    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    user = "postgres" if "postgres" in names else "nobody"
    shutil.chown(folder, user)
    for parent in folder.parents:
        if parent.stat().st_uid == 0 and parent.is_relative_to("/tmp") and parent != Path("/tmp"):
            parent.chmod(parent.stat().st_mode | 0o011)
    return user
