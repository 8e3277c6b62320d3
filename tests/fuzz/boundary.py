"""A boundary, and how its inputs are kept in files."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

CORPUS: Final = Path(__file__).parent / "corpus"
_BYTES: Final = "$bytes"


@dataclass(frozen=True, slots=True)
class Boundary:
    """One place where input enters, and the promise that it keeps.

    Attributes:
        name: Name of the boundary and of its corpus directory, in snake case.
        draw: Makes an input: bytes, or a value of dictionaries with string keys, lists, strings,
            bytes, numbers, booleans and None. The same generator state gives the same input.
        check: Gives one input to the product. It catches the errors that the boundary documents
            and raises for everything else. Returns a word for what happened, such as "refused".
        outcomes: Words that a short run must see, so that a fuzzer whose inputs are all refused
            fails.
        cpu_seconds: Processor time that one input may take, of all threads.
        megabytes: How much the resident memory may grow at most while one input is checked.
        short_inputs: Inputs of the short form in `make test`; at most a second or two of work.
    """

    name: str
    draw: Callable[[Random], Any]
    check: Callable[[Any], str]
    outcomes: frozenset[str] = frozenset()
    cpu_seconds: float = 2.0
    megabytes: int = 64
    short_inputs: int = 300

    @property
    def corpus(self) -> Path:
        """Directory of the inputs that broke the promise once."""
        return CORPUS / self.name

    def kept(self) -> dict[str, Any]:
        """The inputs of the corpus by file name, sorted."""
        files = sorted(self.corpus.glob("*")) if self.corpus.is_dir() else []
        return {file.name: loaded(file) for file in files}


def loaded(file: Path) -> Any:
    """The input in a file of the corpus: JSON, or bytes as they are."""
    if file.suffix == ".json":
        return json.loads(file.read_text(encoding="utf-8"), object_hook=_with_bytes)
    return file.read_bytes()


def keep(directory: Path, name: str, value: Any) -> Path:
    """Write an input to the corpus. Returns its file."""
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(value, bytes):
        file = directory / f"{name}.bin"
        file.write_bytes(value)
        return file
    file = directory / f"{name}.json"
    text = json.dumps(value, default=_without_bytes, indent=1, sort_keys=True)
    file.write_text(text + "\n", encoding="utf-8")
    return file


def _without_bytes(value: object) -> dict[str, str]:
    if isinstance(value, bytes | bytearray):
        return {_BYTES: base64.b64encode(value).decode("ascii")}
    raise TypeError(f"{type(value).__name__} cannot be kept in a corpus")


def _with_bytes(found: dict[str, Any]) -> Any:
    return base64.b64decode(found[_BYTES]) if set(found) == {_BYTES} else found
