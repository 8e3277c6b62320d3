"""Test a pipeline without AWS: its transform, the whole pipeline in memory, failures, and sinks.

docs/testing-your-pipeline.md is the guide. The other modules of this package are what the tests and
the simulation of this project use. They can change in any version.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from kcl_pipeline.testing.conformance import (
        FunctionUnderTest,
        LogUnderTest,
        SinkCase,
        SinkUnderTest,
        at_least_once_cases,
        exactly_once_cases,
    )
    from kcl_pipeline.testing.pipelines import EventLog, PipelineTest
    from kcl_pipeline.testing.records import (
        TransformResult,
        make_records,
        run_transform,
        spark_session,
    )

__all__ = [
    "EventLog",
    "FunctionUnderTest",
    "LogUnderTest",
    "PipelineTest",
    "SinkCase",
    "SinkUnderTest",
    "TransformResult",
    "at_least_once_cases",
    "exactly_once_cases",
    "make_records",
    "run_transform",
    "spark_session",
]

_MODULES: Final = {
    "EventLog": "pipelines",
    "PipelineTest": "pipelines",
    **dict.fromkeys(
        (
            "FunctionUnderTest",
            "LogUnderTest",
            "SinkCase",
            "SinkUnderTest",
            "at_least_once_cases",
            "exactly_once_cases",
        ),
        "conformance",
    ),
}
"""The module of a public name; the others are in `records`."""


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that the simulation does not load pipelines."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib  # noqa: PLC0415 (an import of one submodule does not need it)

    module = importlib.import_module(f"{__name__}.{_MODULES.get(name, 'records')}")
    return getattr(module, name)
