"""Find the version of the code of a pipeline, by which the sensor replaces workers.

It is the option `Fleet(code_version=...)`, else the commit or the image of the code location, else
none. It is found once, when the code is loaded.
"""

import functools
import inspect
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from kcl_pipeline.orchestration.assets.contract import PipelineLike

VARIABLES: Final = ("DAGSTER_CLOUD_GIT_SHA", "DAGSTER_CURRENT_IMAGE")
"""Dagster+ sets the first one in a code location, and Dagster's deployments the second one."""
GIT_SECONDS: Final = 5.0
_CHARACTERS: Final = 40


def code_version(pipeline: PipelineLike) -> str | None:
    """Return the version of the code of a pipeline. None: it is not known."""
    given = pipeline.workers.code_version
    if given is not None:
        return given
    for name in VARIABLES:
        if value := os.environ.get(name):
            # The tag or the digest of an image is at its end
            return value[-_CHARACTERS:]
    folders = (file.parent for _, file in user_code(pipeline))
    return git_commit(next(folders, Path.cwd()))


def user_code(pipeline: PipelineLike) -> Iterator[tuple[Callable[..., Any], Path]]:
    """The user's functions and classes that are in a file, and the file of each."""
    for given in (
        pipeline.transform,
        pipeline.transform_arrow,
        getattr(pipeline.sink, "function", None),
        getattr(pipeline.sink, "processor", None),
    ):
        code: Any = given
        while isinstance(code, functools.partial):
            code = code.func
        if not callable(code):
            continue
        code = inspect.unwrap(code)
        if not hasattr(code, "__qualname__"):  # an object with __call__
            code = type(code)
        try:
            file = inspect.getsourcefile(code)
        except (OSError, TypeError):  # written in a console, or in C
            continue
        if file is not None:
            yield code, Path(file).resolve()


@functools.cache
def git_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in a folder. None: there is none, or no Git."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(  # noqa: S603 (a fixed command)
            command, capture_output=True, text=True, timeout=GIT_SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
