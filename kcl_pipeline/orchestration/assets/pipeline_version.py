"""Compute the version of a pipeline, by which running workers are found to be outdated.

The version is a digest of the user's code, the configuration and the version of this package. It
is computed once, when the code is loaded. The same code gives the same version in every process:
no address, time or order of a hash is in it. Values with names of secrets are left out.
"""

import functools
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kcl_pipeline.orchestration.assets.contract import PipelineLike
from kcl_pipeline.settings_errors import is_secret, without_credentials
from kcl_pipeline.version import __version__

DIGITS: Final = 12
_ADDRESS: Final = re.compile(r" at 0x[0-9a-fA-F]+")


def pipeline_version(pipeline: PipelineLike) -> str:
    """Return the version of a pipeline: 12 hexadecimal digits.

    It changes with the Python files of the package (or the file) of the transform, of the function
    of the sink, of the processor and of the function that selects the streams. If
    `Fleet(code_version=...)` is set, it counts instead of the files. It also changes with the
    settings, the sink, the Spark properties, the run tags, and the version of `kcl_pipeline`.
    The numbers of workers do not count.
    """
    functions = [*_functions(pipeline)]
    fleet = pipeline.workers
    content = {
        "package": __version__,
        "settings": _public(pipeline.settings.model_dump(mode="json")),
        "streams": _described(getattr(pipeline, "streams", ())),
        "sink": _described(pipeline.sink),
        "storage_options": _public(dict(getattr(pipeline.sink, "storage_options", {}))),
        "spark": _public(dict(getattr(pipeline, "spark_config", {}))),
        "run_tags": dict(fleet.run_tags),
        "functions": [f"{one.__module__}:{one.__qualname__}" for one in functions],
        "code": fleet.code_version or _digests(functions),
    }
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def _functions(pipeline: PipelineLike) -> Iterator[Any]:
    """The user's functions, without wrappers that have no name of their own."""
    for one in (
        pipeline.transform,
        getattr(pipeline, "transform_arrow", None),
        getattr(pipeline.sink, "function", None),
        getattr(pipeline.sink, "processor", None),
        getattr(pipeline, "streams", None),
    ):
        function = one
        while isinstance(function, functools.partial):
            function = function.func
        if callable(function):
            function = inspect.unwrap(function)
            # An object with __call__ is described by its class.
            yield function if hasattr(function, "__qualname__") else type(function)


def _described(value: object) -> str:
    return _ADDRESS.sub("", repr(value))


def _public(value: Any) -> Any:
    """A copy without secrets."""
    if isinstance(value, Mapping):
        return {
            str(name): _public(item) for name, item in value.items() if not is_secret(str(name))
        }
    if isinstance(value, list | tuple):
        return [_public(item) for item in value]
    return without_credentials(value)


def _digests(functions: list[Any]) -> dict[str, str]:
    """Digests of the files of the functions, by a name without the folder of the installation."""
    found: dict[str, str] = {}
    for function in functions:
        for name, file in _files(function):
            if name not in found:
                found[name] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


def _files(function: Callable[..., Any]) -> Iterator[tuple[str, Path]]:
    """The Python files of the function's package; of a module without a package, its file."""
    package = str(function.__module__).partition(".")[0]
    folders = [Path(folder) for folder in getattr(sys.modules.get(package), "__path__", ())]
    try:
        own = Path(inspect.getsourcefile(function) or "")
    except TypeError:  # written in C
        return
    folder = next((one for one in folders if own.is_relative_to(one)), None)
    if folder is not None:
        for file in sorted(folder.rglob("*.py")):
            yield f"{package}/{file.relative_to(folder).as_posix()}", file
    elif own.is_file():
        yield own.name, own
