"""`kcl-pipeline init`: write a small project that runs."""

import keyword
import os
import re
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Final

import typer

from kcl_pipeline.cli import show
from kcl_pipeline.cli.target import AsJson
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.version import __version__

_FILES: Final = {
    "definitions.py.txt": "definitions.py",
    "assets_init.py.txt": "assets/__init__.py",
    "assets_pipeline.py.txt": "assets/{name}.py",
    "assets_telemetry.py.txt": "assets/telemetry.py",
    "assets_revenue.py.txt": "assets/revenue.py",
    "resources_init.py.txt": "resources/__init__.py",
    "resources_samples.py.txt": "resources/samples.py",
    "sensors_init.py.txt": "sensors/__init__.py",
    "pipeline_tests.py.txt": "tests/test_{name}.py",
    "workspace.yaml.txt": "workspace.yaml",
    "dagster.yaml.txt": "dagster.yaml",
    "pyproject.toml.txt": "pyproject.toml",
    "requirements.txt.txt": "requirements.txt",
    "requirements-dev.txt.txt": "requirements-dev.txt",
    "gitignore.txt": ".gitignore",
    "README.md.txt": "README.md",
}
"""The templates, and the files that they become."""
_RESERVED: Final = frozenset(
    {"assets", "definitions", "resources", "revenue", "sensors", "telemetry", "tests"}
)
_SECOND_STREAM: Final = "telemetry"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{2,99}")
_STREAM: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_NOT_IN_A_NAME: Final = re.compile(r"[^A-Za-z0-9_]+")


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of the project. It may exist.")
    ],
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="Name of the module and of the KCL application. [default: the folder's name]",
            show_default=False,
        ),
    ] = None,
    stream: Annotated[
        str | None,
        typer.Option(
            "--stream",
            "-s",
            help="Name of the stream. [default: the name of the module]",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that exist.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a Dagster project: two pipelines, a table that follows one, tests and a README.

    Without --force it writes nothing if one of its files exists.
    """
    chosen = _module_name(folder, name)
    read_from = stream or chosen
    if not _STREAM.fullmatch(read_from):
        raise SettingsError(
            f"--stream {read_from!r} is not a stream name; write 1 to 128 of the characters A-Z "
            "a-z 0-9 _ . -"
        )
    if read_from == _SECOND_STREAM:
        raise SettingsError(
            f"--stream {read_from!r} is the stream of the project's second pipeline; write another "
            "name, and rename the stream in the files"
        )
    texts = project_files(chosen, read_from)
    existing = [path for path in texts if os.path.lexists(folder / path)]
    if existing and not force:
        raise SettingsError(
            f"{folder} has {', '.join(existing)} already; choose another folder, or overwrite "
            "with --force"
        )
    _write(folder, texts)
    if as_json:
        result = {"folder": str(folder), "name": chosen, "stream": read_from}
        show.print_json({**result, "files": list(texts), "overwritten": existing})
        return
    for path in texts:
        show.echo(f"{'overwrote' if path in existing else 'wrote'} {folder / path}")
    is_here = folder.resolve() == Path.cwd().resolve()
    show.echo(f"next: {'' if is_here else f'cd {folder}, then '}dagster dev; README.md says more")


def project_files(name: str, stream: str) -> dict[str, str]:
    """The files of a project by path.

    Args:
        name: Name of the module and the application.
        stream: Name of the stream.
    """
    templates = files("kcl_pipeline.cli") / "templates"
    values = {"@NAME@": name, "@STREAM@": stream, "@VERSION@": __version__}
    found = {}
    for template, path in _FILES.items():
        text = (templates / template).read_text(encoding="utf-8")
        for placeholder, value in values.items():
            text = text.replace(placeholder, value)
        found[path.format(name=name)] = text
    return found


def _module_name(folder: Path, name: str | None) -> str:
    found = folder.resolve().name if name is None else name
    if not _NAME.fullmatch(found) or keyword.iskeyword(found):
        usable = _NOT_IN_A_NAME.sub("_", found).strip("_")
        example = usable if _is_free(usable, folder) else "my_pipeline"
        raise SettingsError(
            f"{found!r} is not a Python identifier of 3 to 100 of the characters A-Z a-z 0-9 _; "
            f"write for example --name {example}"
        )
    if not _is_free(found, folder):
        raise SettingsError(
            f"{found!r} is the name of another module or folder; write for example --name "
            f"my_{found}"
        )
    return found


def _is_free(name: str, folder: Path) -> bool:
    """Whether a module of this name hides no other one. A module in `folder` does not count."""
    if not _NAME.fullmatch(name) or keyword.iskeyword(name) or name in _RESERVED:
        return False
    if name in sys.stdlib_module_names:
        return False
    try:
        found = find_spec(name)
    except (ImportError, ValueError):
        return False
    if found is None or found.origin is None:  # a folder without code
        return True
    return Path(found.origin).resolve().is_relative_to(folder.resolve())


def _write(folder: Path, texts: dict[str, str]) -> None:
    try:
        for path, text in texts.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise SettingsError(
            f"cannot write {error.filename}: {error.strerror}; choose another folder"
        ) from error
