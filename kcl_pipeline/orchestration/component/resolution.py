"""Turn attributes into the objects that they describe."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated, Any, Final, get_args, get_origin

from dagster.components import ResolutionContext
from dagster.components.resolved.core_models import resolve_assets_def_update_kwargs_to_mapping

from kcl_pipeline.arguments import load_object
from kcl_pipeline.orchestration.component.schema import (
    REFERENCE,
    Attributes,
    OutputAssetAttributes,
    alternatives,
)

_TEXT: Final = "text:"


def resolved(context: ResolutionContext, value: Any, kind: Any = Any) -> Any:
    """Return what an attribute describes, with its templates rendered.

    Args:
        context: Scope of the templates.
        value: The attribute.
        kind: Its type in the schema.

    Raises:
        SettingsError: A value is wrong, or a function does not exist.
    """
    if isinstance(value, OutputAssetAttributes):
        return dict(resolve_assets_def_update_kwargs_to_mapping(context, value))
    if isinstance(value, Attributes):
        fields = type(value).model_fields
        given = {
            name: resolved(context.at_path(name), getattr(value, name), field.rebuild_annotation())
            for name, field in fields.items()
            if name in value.model_fields_set
        }
        return type(value).target(**given)
    if isinstance(value, str):
        return _of_text(context, value, kind)
    if isinstance(value, Mapping):
        return {key: resolved(context.at_path(key), one, _item(kind)) for key, one in value.items()}
    if isinstance(value, Sequence):
        return [resolved(context.at_path(i), one, _item(kind)) for i, one in enumerate(value)]
    return value


def _of_text(context: ResolutionContext, text: str, kind: Any) -> Any:
    kinds = [_without_metadata(one) for one in alternatives(kind)]
    found: Any = text
    # Dagster's templates also convert strings without a template: "1.1" becomes a number
    if "{{" in text or "{%" in text:
        if str in alternatives(kind):  # a number in the environment remains a string
            return str(context.resolve_value(_TEXT + text)).removeprefix(_TEXT)
        found = context.resolve_value(text)
    if not isinstance(found, str):
        return found
    if REFERENCE in str(kind):
        return load_object(".".join(map(str, context.path[1:])), found)
    return _time(found) if datetime in kinds else found


def _time(text: str) -> datetime | str:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return text  # the constructor refuses it, with its name


def _item(kind: Any) -> Any:
    """The type of the items of a list, or of the values of a mapping."""
    for one in map(_without_metadata, alternatives(kind)):
        origin = get_origin(one)
        if isinstance(origin, type) and issubclass(origin, Mapping | Sequence):
            return get_args(one)[issubclass(origin, Mapping)]
    return Any


def _without_metadata(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind
