"""Write error messages about wrong settings and arguments.

Each message names the setting, its value, what is wrong, and what to write instead. For an unknown
name it suggests the nearest setting of the models in `config`.
"""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Literal, NoReturn, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from kcl_pipeline.config.model import most_of
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.text import printable

SHOWN_VALUE: Final = 100
MAX_SENTENCES: Final = 8
SIMILARITY: Final = 0.6
"""Smallest similarity of a suggested name, from 0 to 1 (difflib's default)."""

_SECRET: Final = re.compile(
    r"secret|token|passw|pwd|credential|signature|private|api_?key|access[._-]?key|account[._-]?key"
    r"|\bsas\b|sas[._-]?(key|token)",
    re.IGNORECASE,
)
_USER_IN_URL: Final = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY_OF_URL: Final = re.compile(r"(://[^?\s]*\?)[^\s'\")]+")
_PROBLEMS: Final = {
    "greater_than": "is too small",
    "greater_than_equal": "is too small",
    "less_than": "is too large",
    "less_than_equal": "is too large",
    "string_too_short": "is too short",
    "string_too_long": "is too long",
    "too_short": "is empty",
    "too_long": "has too many entries",
    "string_pattern_mismatch": "has characters that are not allowed",
    "finite_number": "is not a finite number",
}
_UNITS: Final = (
    ("_millis", "a time in milliseconds"),
    ("_seconds", "a time in seconds"),
    ("_bytes", "a number of bytes"),
    ("_percent", "a percentage"),
    ("_kbps", "a rate in KiB per second"),
    ("_records", "a number of records"),
    ("_threads", "a number of threads"),
    ("_share", "a share"),
)


def is_secret(name: str) -> bool:
    """Return whether a setting of this name may contain a secret, such as a storage key."""
    return _SECRET.search(name) is not None


def names_only(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of options for texts: every name, and no value.

    Which option of a store or of Spark is a secret cannot be seen in its name.
    """
    return dict.fromkeys(options, "***")


def without_credentials(value: Any) -> Any:
    """Return a text whose URLs have no user, password or query. Other values are unchanged.

    A query may be a signature, such as a SAS token of Azure.
    """
    if not isinstance(value, str):
        return value
    return _QUERY_OF_URL.sub(r"\1***", _USER_IN_URL.sub("***@", value))


def shown(value: object, name: str = "") -> str:
    """Return the value for a message: one line, of limited length, without secrets."""
    if is_secret(name):
        return "'***'"
    try:
        text = repr(without_credentials(value))
    except Exception:  # noqa: BLE001 (the value may be of any class)
        text = f"<{type(value).__name__}>"
    return printable(text, SHOWN_VALUE)


def wrong(name: str, value: object, problem: str, advice: str) -> SettingsError:
    """Return the error with the message `name=value problem. Advice`."""
    return SettingsError(f"{name}={shown(value, name)} {problem}. {advice}.")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the most similar known name. Case, hyphens and camel case are ignored."""
    plain = {_plain(candidate): candidate for candidate in known}
    found = difflib.get_close_matches(_plain(name), plain, 1, SIMILARITY)
    return plain[found[0]] if found else None


def unknown(name: str, known: Sequence[str], what: str) -> str:
    """Return `name is not what. Did you mean ...?`, or the same with a list of known names."""
    return f"{printable(name, SHOWN_VALUE)} is not {what}. {suggestion(name, known)}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return `Did you mean ...?`, or `Write one of ...` with all known names."""
    names = sorted(known)
    close = nearest(name, names)
    return f"Did you mean {close}?" if close else f"Write one of {', '.join(names)}."


def check_names(given: Iterable[str], known: Sequence[str], what: str) -> None:
    """Raise `SettingsError` for the first name that is not known."""
    for name in given:
        if name not in known:
            raise SettingsError(unknown(str(name), known, what))


def refuse_settings(
    error: ValidationError, model: type[BaseModel], renamed: Mapping[str, str] | None = None
) -> NoReturn:
    """Raise `SettingsError` with a sentence for each problem that pydantic found.

    Args:
        error: The problems.
        model: The settings that were validated.
        renamed: Top-level settings that users write under another name, and that name.
    """
    raise SettingsError(settings_sentence(error, model, renamed)) from None


def settings_sentence(
    error: ValidationError, model: type[BaseModel], renamed: Mapping[str, str] | None = None
) -> str:
    """Return a sentence or more for each problem that pydantic found; see `refuse_settings`."""
    problems = error.errors(include_url=False)
    locations = [tuple(problem["loc"]) for problem in problems]
    sentences = [
        _sentence(problem, model, renamed or {})
        for problem, location in zip(problems, locations, strict=True)
        # For a wrong item pydantic reports the list as too short, too
        if not any(other != location and other[: len(location)] == location for other in locations)
    ]
    more = len(sentences) - MAX_SENTENCES
    if more > 0:
        sentences[MAX_SENTENCES:] = [f"{more} more settings are wrong."]
    return " ".join(sentences)


def _sentence(
    problem: Mapping[str, Any], model: type[BaseModel], renamed: Mapping[str, str]
) -> str:
    location: tuple[str | int, ...] = tuple(problem["loc"])
    path = _path(location, renamed)
    kind, value = str(problem["type"]), problem["input"]
    if kind == "extra_forbidden":
        return _unknown_setting(path, location, model)
    if kind == "value_error":
        return f"{problem.get('ctx', {}).get('error', problem['msg'])}".rstrip(".") + "."
    _, field = _innermost(location, model)
    if field is not None and kind == "literal_error" and isinstance(value, str):
        close = nearest(value, [str(choice) for choice in get_args(_kind(field)[0])])
        if close is not None:
            return f"{path}={shown(value, path)} is not one of its values. Did you mean {close!r}?"
    advice = "Write another value"
    if field is not None:
        advice = f"Write {_what_to_write(field, location, above=kind.startswith('less_than'))}"
    if kind == "missing":
        return f"{path} is missing. {advice}."
    return f"{path}={shown(value, path)} {_problem(kind, field, problem)}. {advice}."


def _path(location: Sequence[str | int], renamed: Mapping[str, str]) -> str:
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = printable(str(part), SHOWN_VALUE)
            path += f".{name}" if path else renamed.get(name, name)
    return path or "settings"


def _unknown_setting(path: str, location: Sequence[str | int], model: type[BaseModel]) -> str:
    (group, _), last = _innermost(location[:-1], model), str(location[-1])
    prefix = path[: len(path) - len(printable(last, SHOWN_VALUE))]
    close = nearest(last, group.model_fields)
    if close is not None:
        return f"{path} is not a setting. Did you mean {prefix}{close}?"
    everywhere = {name.rpartition(".")[2]: name for name in setting_names(model)}
    close = nearest(last, everywhere)
    if close is not None:
        return f"{path} is not a setting. Did you mean {everywhere[close]}?"
    listed = ", ".join(f"{prefix}{name}" for name in group.model_fields)
    return f"{path} is not a setting. Write one of {listed}."


def setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield the dotted names of all settings."""
    for name, field in model.model_fields.items():
        group = _group(field)
        if group is None:
            yield prefix + name
        else:
            yield from setting_names(group, f"{prefix}{name}.")


def _innermost(
    location: Sequence[str | int], model: type[BaseModel]
) -> tuple[type[BaseModel], FieldInfo | None]:
    """The innermost group of settings on the way to a location, and the last field on it."""
    found: FieldInfo | None = None
    for part in location:
        found = model.model_fields.get(str(part))
        group = None if found is None else _group(found)
        if group is None:
            break
        model = group
    return model, found


def _group(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _kind(field: FieldInfo) -> tuple[Any, bool]:
    """The annotation without None, and whether None is allowed."""
    kind = field.annotation
    if get_origin(kind) in (Union, types.UnionType):
        rest = [part for part in get_args(kind) if part is not type(None)]
        return rest[0], len(rest) < len(get_args(kind))
    return kind, False


def _problem(kind: str, field: FieldInfo | None, problem: Mapping[str, Any]) -> str:
    if kind in _PROBLEMS:
        return _PROBLEMS[kind]
    if field is not None:
        return "is not a string" if kind == "string_type" else f"is not {_noun(field)}"
    return f"cannot be used ({printable(str(problem['msg']), SHOWN_VALUE)})"


def _noun(field: FieldInfo) -> str:
    kind, _ = _kind(field)
    if get_origin(kind) is Literal:
        return "one of its values"
    if _group(field) is not None:
        return "a group of settings"
    names = {
        bool: "True or False",
        int: "a whole number",
        float: "a number",
        str: "a string",
        datetime: "a time",
        dict: "a dictionary of strings",
        tuple: "a list of strings",
        list: "a list of strings",
    }
    return names.get(get_origin(kind) or kind, "a value that can be used")


def _what_to_write(field: FieldInfo, location: Sequence[str | int], *, above: bool) -> str:
    """Return what to write for a field, with unit, bounds and choices."""
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "write" in extra:
        return str(extra["write"])
    kind, optional = _kind(field)
    if get_origin(kind) is Literal:
        wanted = _choices(get_args(kind))
    elif (group := _group(field)) is not None:
        first, example = next(iter(group.model_fields.items()))
        default = example.get_default(call_default_factory=True)
        wanted = f"a dictionary, such as {{{first!r}: {default!r}}}"
    elif kind in (int, float):
        name = str(location[-1])
        wanted = _unit(name, kind) + _bounds(field, name, above=above)
    elif kind is str:
        wanted = "a string" + _lengths(field)
    else:
        wanted = _noun(field)
    return f"{wanted}, or None" if optional else wanted


def _choices(values: Sequence[object]) -> str:
    *rest, last = (repr(value) for value in values)
    return f"{', '.join(rest)} or {last}" if rest else last


def _unit(name: str, kind: type) -> str:
    found = next((unit for suffix, unit in _UNITS if suffix in name), None)
    return found or ("a whole number" if kind is int else "a number")


def _bounds(field: FieldInfo, name: str, *, above: bool) -> str:
    low = high = ""
    for bound in field.metadata:
        match bound:
            case Ge(ge=value):
                low = f"{value}"
            case Gt(gt=value):
                low = f"more than {value}"
            case Le(le=value):
                high = f"{value}"
            case Lt(lt=value):
                high = f"less than {value}"
    if not high and above:
        high = str(most_of(name))
    if low and high:
        return f", {low} to {high}"
    if low:
        return f", {low}" if low.startswith("more") else f", {low} or more"
    return f", at most {high}" if high else ""


def _lengths(field: FieldInfo) -> str:
    least = next((m.min_length for m in field.metadata if isinstance(m, MinLen)), None)
    most = next((m.max_length for m in field.metadata if isinstance(m, MaxLen)), None)
    if most is not None:
        return f" of {least or 0} to {most} characters"
    return " that is not empty" if least else ""


def _plain(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(name)).replace("-", "_").lower()
