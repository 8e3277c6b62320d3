"""Sentences about wrong settings and arguments.

Each one says what is wrong, names the setting with its value, and says what to write instead. The
names of settings are looked up in the models of `config`, so that a misspelled one is answered with
the nearest one.
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

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.settings_model import most_of
from kcl_pipeline.text import printable

SHOWN_VALUE: Final = 100
HIDDEN: Final = "'***'"
MOST_SENTENCES: Final = 8
CLOSE: Final = 0.6
"""Similarity from which a known name is suggested (difflib's default)."""

_SECRET: Final = re.compile(
    r"secret|token|passw|pwd|credential|signature|private|api_?key|access[._-]?key|account[._-]?key"
    r"|\bsas\b|sas[._-]?(key|token)",
    re.IGNORECASE,
)
_USER_IN_URL: Final = re.compile(r"(?<=://)[^/@\s]+@")
_TOO_SMALL: Final = frozenset({"greater_than", "greater_than_equal"})
_TOO_LARGE: Final = frozenset({"less_than", "less_than_equal"})
_LENGTHS: Final = {
    "string_too_short": "is too short",
    "string_too_long": "is too long",
    "too_short": "is empty",
    "too_long": "has too many entries",
}
_UNITS: Final = (
    ("_millis", "a time in milliseconds"),
    ("_seconds", "a time in seconds"),
    ("_bytes", "a number of bytes"),
    ("_percentage", "a percentage"),
    ("_kbps", "a rate in KiB per second"),
    ("_records", "a number of records"),
    ("_threads", "a number of threads"),
    ("_share", "a share"),
)


def is_secret(name: str) -> bool:
    """Whether a setting of this name may hold a secret, such as a key of an object store."""
    return _SECRET.search(name) is not None


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of options for people: values of secret names, and users in URLs, are hidden."""
    return {
        name: "***" if is_secret(str(name)) else without_user(value)
        for name, value in options.items()
    }


def without_user(value: Any) -> Any:
    """A URL without user and password; everything else as it is."""
    return _USER_IN_URL.sub("***@", value) if isinstance(value, str) else value


def shown(value: object, name: str = "") -> str:
    """The value for a message: one line, bounded, without secrets."""
    if is_secret(name):
        return HIDDEN
    try:
        text = repr(without_user(value))
    except Exception:  # noqa: BLE001 (the value may be of any class)
        text = f"<{type(value).__name__}>"
    return printable(text, SHOWN_VALUE)


def wrong(name: str, value: object, problem: str, advice: str) -> SettingsError:
    """The error with the sentence `name=value problem. Advice`."""
    return SettingsError(f"{name}={shown(value, name)} {problem}. {advice}.")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was probably meant; case, hyphens and camel case do not count."""
    plain = {_plain(one): one for one in known}
    found = difflib.get_close_matches(_plain(name), plain, 1, CLOSE)
    return plain[found[0]] if found else None


def unknown(name: str, known: Sequence[str], what: str) -> str:
    """`name is not what. Did you mean ...?`, or a list of what is known."""
    close = nearest(name, known)
    if close is not None:
        return f"{printable(name, SHOWN_VALUE)} is not {what}. Did you mean {close}?"
    listed = ", ".join(sorted(known))
    return f"{printable(name, SHOWN_VALUE)} is not {what}. Write one of {listed}."


def check_names(given: Iterable[str], known: Sequence[str], what: str) -> None:
    """Raise `SettingsError` for the first given name that is not known."""
    for name in given:
        if name not in known:
            raise SettingsError(unknown(str(name), known, what))


def refuse_settings(
    error: ValidationError, model: type[BaseModel], renamed: Mapping[str, str] | None = None
) -> NoReturn:
    """Raise `SettingsError` with one sentence for each problem that pydantic found.

    `renamed`: what the caller's users write for some top-level settings.
    """
    raise SettingsError(settings_sentence(error, model, renamed)) from None


def settings_sentence(
    error: ValidationError, model: type[BaseModel], renamed: Mapping[str, str] | None = None
) -> str:
    """One sentence or more for each problem that pydantic found."""
    problems = error.errors(include_url=False)
    places = [tuple(problem["loc"]) for problem in problems]
    sentences = [
        _sentence(problem, model, renamed or {})
        for problem, place in zip(problems, places, strict=True)
        # What is wrong inside a list makes pydantic count it as shorter, too
        if not any(other != place and other[: len(place)] == place for other in places)
    ]
    more = len(sentences) - MOST_SENTENCES
    rest = [f"{more} more settings are wrong."] if more > 0 else []
    return " ".join(sentences[:MOST_SENTENCES] + rest)


def _sentence(
    problem: Mapping[str, Any], model: type[BaseModel], renamed: Mapping[str, str]
) -> str:
    place: tuple[str | int, ...] = tuple(problem["loc"])
    path = _path(place, renamed)
    kind, value = str(problem["type"]), problem["input"]
    if kind == "extra_forbidden":
        return _unknown_setting(path, place, model)
    if kind == "value_error":
        return f"{problem.get('ctx', {}).get('error', problem['msg'])}".rstrip(".") + "."
    field = _field(place, model)
    if field is not None and kind == "literal_error" and isinstance(value, str):
        close = nearest(value, [str(choice) for choice in get_args(_kind(field)[0])])
        if close is not None:
            return f"{path}={shown(value, path)} is not one of its values. Did you mean {close!r}?"
    advice = "Write another value"
    if field is not None:
        advice = f"Write {_wanted(field, place, above=kind in _TOO_LARGE)}"
    if kind == "missing":
        return f"{path} is missing. {advice}."
    return f"{path}={shown(value, path)} {_problem(kind, field, problem)}. {advice}."


def _path(place: Sequence[str | int], renamed: Mapping[str, str]) -> str:
    path = ""
    for part in place:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            name = printable(str(part), SHOWN_VALUE)
            path += f".{name}" if path else renamed.get(name, name)
    return path or "settings"


def _unknown_setting(path: str, place: Sequence[str | int], model: type[BaseModel]) -> str:
    group, last = _model_at(place[:-1], model), str(place[-1])
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
    """All settings as dotted names."""
    for name, field in model.model_fields.items():
        group = _group(field)
        if group is None:
            yield prefix + name
        else:
            yield from setting_names(group, f"{prefix}{name}.")


def _model_at(place: Sequence[str | int], model: type[BaseModel]) -> type[BaseModel]:
    for part in place:
        field = model.model_fields.get(str(part))
        group = None if field is None else _group(field)
        if group is None:
            break
        model = group
    return model


def _field(place: Sequence[str | int], model: type[BaseModel]) -> FieldInfo | None:
    found: FieldInfo | None = None
    for part in place:
        found = model.model_fields.get(str(part))
        group = None if found is None else _group(found)
        if group is None:
            break
        model = group
    return found


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
    if kind in _TOO_SMALL:
        return "is too small"
    if kind in _TOO_LARGE:
        return "is too large"
    if kind in _LENGTHS:
        return _LENGTHS[kind]
    if kind == "string_pattern_mismatch":
        return "has characters that are not allowed"
    if kind == "finite_number":
        return "is not a finite number"
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
    }
    return names.get(get_origin(kind) or kind, "a value that can be used")


def _wanted(field: FieldInfo, place: Sequence[str | int], *, above: bool) -> str:
    """What to write for a field, with unit, bounds and choices."""
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
        name = str(place[-1])
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
