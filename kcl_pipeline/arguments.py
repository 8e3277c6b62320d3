"""Check the arguments that users write in Python: names, types and ranges."""

from __future__ import annotations

import importlib
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final, TypeVar

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.settings_errors import check_names, shown, wrong

MAX_TEXT: Final = 4_096
"""Largest number of characters of a string argument (our own limit)."""

MAX_NUMBER: Final = 2**63 - 1
"""Largest number of an argument without another limit (our own limit)."""

_T = TypeVar("_T")


def checked_arguments(cls: type[_T]) -> type[_T]:
    """Make the constructor of a class report unknown, missing and superfluous arguments.

    Python's own message does not suggest the nearest known name. The constructor raises
    `SettingsError`.
    """
    original = cls.__init__
    parameters = inspect.signature(cls).parameters
    names = list(parameters)
    required = [name for name, one in parameters.items() if one.default is one.empty]

    @wraps(original)
    def construct(self: _T, *given: Any, **named: Any) -> None:
        check_names(named, names, f"an argument of {cls.__name__}")
        if len(given) > len(names):
            raise SettingsError(
                f"{cls.__name__} has {len(names)} arguments, but {len(given)} are given. Write "
                f"them by name: {', '.join(names)}."
            )
        for name in names[: len(given)]:
            if name in named:
                raise SettingsError(f"{cls.__name__} has {name} twice. Write it once.")
        missing = [name for name in required if name not in names[: len(given)] + list(named)]
        if missing:
            raise SettingsError(
                f"{cls.__name__} has no {missing[0]}. Write {missing[0]}=..., "
                f"one of its arguments {', '.join(names)}."
            )
        original(self, *given, **named)

    cls.__init__ = construct  # type: ignore[assignment] # (it calls the original constructor)
    return cls


def check_flag(name: str, value: object) -> None:
    """Raise `SettingsError` unless the value is True or False."""
    if not isinstance(value, bool):
        raise wrong(name, value, "is not True or False", "Write True or False")


def check_text(name: str, value: object, advice: str, *, optional: bool = False) -> None:
    """Raise `SettingsError` unless the value is a printable string that is neither blank nor long.

    Args:
        name: Name of the argument.
        value: Its value.
        advice: What to write instead, without the final period.
        optional: Accept None.
    """
    if value is None and optional:
        return
    if not isinstance(value, str):
        raise wrong(name, value, "is not a string", advice)
    if not value.strip():
        raise wrong(name, value, "is empty", advice)
    if len(value) > MAX_TEXT or not value.isprintable():
        problem = "is too long" if value.isprintable() else "has characters that do not print"
        raise wrong(name, value, problem, advice)


def check_texts(name: str, value: object, advice: str) -> None:
    """Raise `SettingsError` unless the value is a list or tuple of strings."""
    if isinstance(value, str):
        raise wrong(name, value, "is a string", f"Write {name}=[{shown(value)}]")
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        raise wrong(name, value, "is not a list", advice)
    for index, item in enumerate(value):
        check_text(f"{name}[{index}]", item, advice)


def check_options(name: str, value: object, example: str, *, hidden: bool = False) -> None:
    """Raise `SettingsError` unless the value is a mapping of strings to strings.

    Args:
        name: Name of the argument.
        value: Its value.
        example: What to write instead.
        hidden: Show no value in the message, because any of them may be a secret.
    """
    if not isinstance(value, Mapping):
        given = name if hidden else f"{name}={shown(value, name)}"
        raise SettingsError(f"{given} is not a dictionary. Write {name}={example}.")
    for key, item in value.items():
        if not isinstance(key, str):
            path, given = f"{name}, key", "***" if hidden else key
            raise wrong(path, given, "is not a string", f"Write {name}={example}")
        if isinstance(item, str):
            continue
        path = f"{name}[{shown(key)}]"
        if hidden and not isinstance(item, bool):
            raise SettingsError(
                f"{path} is of type {type(item).__name__}, not a string. Write it in quotes."
            )
        written = "true" if item is True else "false" if item is False else str(item)
        raise wrong(path, item, "is not a string", f"Write {shown(written, key)}")


def check_number(
    name: str,
    value: object,
    unit: str,
    *,
    least: float = 0,
    most: float = math.inf,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """Raise `SettingsError` unless the value is a number from `least` to `most` (inclusive).

    Args:
        name: Name of the argument.
        value: Its value.
        unit: The value in words, such as ``a time in seconds``.
        least: Smallest value.
        most: Largest value.
        whole: Accept whole numbers only.
        optional: Accept None.
    """
    if value is None and optional:
        return
    span = "or more" if most == math.inf else f"to {_plain(most)}"
    advice = f"Write {unit}, {_plain(least)} {span}{', or None' if optional else ''}"
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise wrong(name, value, f"is not {'a whole' if whole else 'a'} number", advice)
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(name, value, "is not a finite number", advice)
    if not least <= value <= min(most, MAX_NUMBER):
        raise wrong(name, value, "is too small" if value < least else "is too large", advice)


def check_function(name: str, value: object, takes: Sequence[str], example: str) -> None:
    """Raise `SettingsError` unless the value can be called with these positional arguments.

    Args:
        name: Name of the argument.
        value: Its value.
        takes: Names of the positional arguments that the caller passes.
        example: What to write instead.
    """
    if isinstance(value, type) or not callable(value):
        raise wrong(name, value, "is not a function", f"Write {name}={example}")
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(*takes)
    except TypeError:
        count = "one argument" if len(takes) == 1 else f"{len(takes)} arguments"
        raise wrong(
            name,
            value,
            f"cannot be called with {count} ({', '.join(takes)}): it takes {signature}",
            f"Write {name}={example}",
        ) from None


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else f"{number:g}"


def function_name(function: Callable[..., object] | None) -> str:
    """Return the name of a function for messages, without the address that Python adds."""
    return "None" if function is None else str(getattr(function, "__qualname__", function))


def load_object(name: str, text: str) -> object:
    """Load the object at `module:attribute`.

    Args:
        name: Name of the argument or option, for messages.
        text: Its value.

    Raises:
        SettingsError: The object does not exist, or its module raises an error.
    """
    module_name, colon, attribute = text.partition(":")
    if not (module_name and colon and attribute):
        raise SettingsError(
            f"{name} {text!r} is not module:attribute; write for example my_project.orders:pipeline"
        )
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise SettingsError(
            f"{name} {text}: there is no module {error.name!r} in this folder or on PYTHONPATH"
        ) from error
    except SettingsError:
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise SettingsError(
            f"{name} {text}: {module_name} raised {type(error).__name__}: {error} "
            f"({frame.filename}:{frame.lineno})"
        ) from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise SettingsError(f"{name} {text}: {module_name} has no {attribute!r}")
        found = getattr(found, part)
    return found
