"""Hold storage options in a mapping whose `repr` shows names without values."""

from __future__ import annotations

from collections import UserDict


class StorageOptions(UserDict[str, str]):
    """Storage options of delta-rs. They may contain keys and tokens, so `repr` has no values.

    The class is not a `dict`, because many tools print the values of dictionaries.
    """

    def __repr__(self) -> str:
        return f"StorageOptions({', '.join(f'{name}=***' for name in self)})"
