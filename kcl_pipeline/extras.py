"""Check that an optional dependency is installed, and name the extra that brings it.

The core package imports without any extra. A feature that needs one calls `require` first.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

from kcl_pipeline.errors import SettingsError

MODULES: Final = {
    "http2": ("h2",),
    "local": ("moto", "flask", "flask_cors", "werkzeug", "h2", "requests"),
    "otel": ("opentelemetry.metrics",),
    "prometheus": ("prometheus_client",),
    "webserver": ("dagster_webserver",),
}
"""The modules that each extra brings and that the product imports or starts."""


def require(extra: str, feature: str, instead: str = "") -> None:
    """Check that the modules of an extra can be imported. This does not import them.

    Args:
        extra: Name of the extra.
        feature: What needs it; the message begins with it.
        instead: What to write instead, without the extra.

    Raises:
        SettingsError: A module is missing. The message names the extra.
    """
    missing = [name for name in MODULES[extra] if not _exists(name)]
    if missing:
        raise SettingsError(
            f"{feature} needs an extra (missing: {', '.join(missing)}): "
            f"pip install 'kcl-pipeline[{extra}]'" + (f", or {instead}" if instead else "")
        )


def is_installed(extra: str) -> bool:
    """Return whether all modules of an extra can be imported. This does not import them."""
    return all(_exists(name) for name in MODULES[extra])


def _exists(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        # A parent of a dotted name is missing
        return False
