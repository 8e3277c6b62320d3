"""Hold storage options in a mapping whose `repr` shows names without values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class StorageOptions(Mapping[str, str]):
    """Storage options of delta-rs. They may contain keys and tokens, so `repr` has no values.

    The class is not a `dict`, because many tools print the values of dictionaries.
    """

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        self._options = dict(options or {})

    def __getitem__(self, name: str) -> str:
        return self._options[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._options)

    def __len__(self) -> int:
        return len(self._options)

    def __repr__(self) -> str:
        return f"StorageOptions({', '.join(f'{name}=***' for name in self._options)})"
