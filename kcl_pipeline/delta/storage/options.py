"""Storage options: a mapping that shows its names and never its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class StorageOptions(Mapping[str, str]):
    """delta-rs' storage options. Among them are keys and tokens, so no text has the values.

    It is not a `dict`: tools that print the contents of dictionaries take its `repr`.
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
