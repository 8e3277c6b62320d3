"""The Kinesis Client Library 3.x in Python, as a Dagster package.

A pipeline needs only `from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kcl_pipeline.version import __version__

if TYPE_CHECKING:
    from kcl_pipeline.delta.sink import DeltaSink
    from kcl_pipeline.pipeline import Fleet, KinesisPipeline

__all__ = ["DeltaSink", "Fleet", "KinesisPipeline", "__version__"]

_MODULES = {
    "DeltaSink": "kcl_pipeline.delta.sink",
    "Fleet": "kcl_pipeline.pipeline",
    "KinesisPipeline": "kcl_pipeline.pipeline",
}


def __getattr__(name: str) -> Any:
    """Load one of the public names on first use, so that the command line starts without boto3."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 (an import of one submodule does not need it)

    return getattr(importlib.import_module(_MODULES[name]), name)
