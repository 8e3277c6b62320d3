"""A Grafana dashboard and Prometheus alert rules for the metrics of this package.

They are in the wheel, so that they fit the metrics of the installed version.
"""

from importlib.resources import files
from pathlib import Path
from typing import Final

FILES: Final = ("kcl_dashboard.json", "kcl_alerts.yml")


def read(name: str) -> str:
    """Return the text of one of the files."""
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def copy_to(folder: Path) -> list[Path]:
    """Write the files to a folder, which is created if necessary; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / name for name in FILES]
    for path in written:
        path.write_text(read(path.name), encoding="utf-8")
    return written
