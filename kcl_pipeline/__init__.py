"""The Kinesis Client Library 3.x in Python, as a Dagster package.

`from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline` is all that a pipeline needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kcl_pipeline.version import __version__

if TYPE_CHECKING:
    from kcl_pipeline.delta.sink import DeltaSink
    from kcl_pipeline.pipeline import Fleet, KinesisPipeline

__all__ = ["DeltaSink", "Fleet", "KinesisPipeline", "__version__"]

_PLACES = {
    "DeltaSink": "kcl_pipeline.delta.sink",
    "Fleet": "kcl_pipeline.pipeline",
    "KinesisPipeline": "kcl_pipeline.pipeline",
}


def __getattr__(name: str) -> Any:
    """The user's three names, loaded when they are asked for: the command line starts without
    boto3.
    """
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 (not needed by an import of one part)

    return getattr(importlib.import_module(_PLACES[name]), name)
