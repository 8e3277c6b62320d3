"""The version of this package."""

__version__ = "0.1.0"
"""The version of this package.

Example:
    >>> from kcl_pipeline import __version__
    >>> __version__.count(".")
    2
"""
