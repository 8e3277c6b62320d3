"""Build the schema of the attributes of the component.

Fields, types, defaults and descriptions come from the classes that users write in Python. A new
field of such a class is therefore also an attribute.
"""

import dataclasses
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import dagster as dg
from dagster.components.resolved.core_models import AssetsDefUpdateKwargs
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.config.model import StrictSettings
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.foreach import ForeachArrowSink, ForeachBatchSink
from kcl_pipeline.orchestration.assets.contract import ASSET_ATTRIBUTES, DagsterOptions
from kcl_pipeline.orchestration.component.descriptions import field_descriptions
from kcl_pipeline.orchestration.resources import AwsResource
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.pipeline.arguments import Fleet
from kcl_pipeline.settings_errors import is_secret
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.stream_config import StreamConfig, StreamSelector

TEMPLATE: Final = "template"
Template = Annotated[str, TEMPLATE]
"""A string for an attribute that is not a string: a template, such as `{{ env.NAME | int }}`."""

REFERENCE: Final = "reference"
Reference = Annotated[str, REFERENCE]
"""The address of a function, `module:function`."""

_REFERENCE_TEXT: Final = "A function is written as `module:function`."
_SETTINGS_TEXT: Final = "Settings by section, with the names of KCL in snake_case."
_TEXTS: Final = {"settings_overrides": _SETTINGS_TEXT}
"""Descriptions that differ from those in Python."""

_AWS_TEXT: Final = (
    "Region, endpoint and credentials, or the key of an AwsResource among your resources. null: "
    "the standard environment."
)
_SPARK_TEXT: Final = (
    "The key of a resource with a Spark session among your resources, or a template that returns "
    "one: a SparkResource, or a PySparkResource or LazyPySparkResource of dagster-pyspark. null: a "
    "SparkResource with spark_config."
)
_ASSET_TEXT: Final = (
    "Attributes of the output that replace those of this package; metadata and tags are merged. Or "
    "a template that returns a function of the AssetSpec of each asset."
)


class Attributes(BaseModel):
    """Attributes with fixed names."""

    model_config = ConfigDict(extra="forbid", strict=True)

    target: ClassVar[Callable[..., Any]] = dict
    """What the attributes are the arguments of."""


class OutputAssetAttributes(dg.Model):
    """Attributes of the output, as in other components of Dagster."""


def _variable(env: str) -> dg.EnvVar:
    return dg.EnvVar(env)


class EnvironmentVariable(Attributes):
    """The environment variable that holds a secret."""

    target = _variable

    env: str = Field(description="Name of the variable. The Dagster UI shows only the name")


def _sink(**forms: Any) -> Any:
    given = [sink for sink in forms.values() if sink is not None]
    if len(given) != 1:
        written = ", ".join(forms) or "nothing"
        raise SettingsError(
            f"sink has {written}. Write one of delta (a DeltaSink), foreach_arrow (a "
            "ForeachArrowSink) and foreach_batch (a ForeachBatchSink)."
        )
    return given[0]


@cache
def component_attributes() -> type[Attributes]:
    """Return the attributes of `KinesisPipelineComponent`."""
    sinks = _created(
        "SinkAttributes",
        "The sink, in one of its forms.",
        _sink,
        delta=(_of_class(DeltaSink) | None, Field(None, description=_summary(DeltaSink))),
        foreach_arrow=(
            _of_class(ForeachArrowSink) | None,
            Field(None, description=_summary(ForeachArrowSink)),
        ),
        foreach_batch=(
            _of_class(ForeachBatchSink, function=Reference) | None,
            Field(None, description=_summary(ForeachBatchSink)),
        ),
    )
    stream: Any = str | _of_class(StreamConfig)
    streams = list[stream] | _of_class(StreamSelector) | Reference
    pipeline: type[Attributes] = _of_class(
        KinesisPipeline,
        streams=streams,
        sink=sinks | None,
        transform=Reference | None,
        transform_arrow=Reference | None,
        processor=Reference | None,
        workers=_of_class(Fleet),
        settings_overrides=_settings(),
        spark_config=Mapping[str, str],
    )
    found: type[Attributes] = _created(
        "KinesisPipelineAttributes", "", dict, base=pipeline, **_options()
    )
    return found


def _options() -> dict[str, Any]:
    """The options of the definitions."""
    kinds = {
        "aws": _aws() | Template | None,
        "spark": Template | None,
        "asset_attributes": _asset_attributes() | Template | None,
        "check_limits": _of_class(CheckLimits) | None,
    }
    texts = {"aws": _AWS_TEXT, "spark": _SPARK_TEXT, "asset_attributes": _ASSET_TEXT}
    found = {}
    for name, field in DagsterOptions.model_fields.items():
        kind, given = _setting(field)
        text = texts.get(name, field.description or "")
        found[name] = _field(kinds[name], field.default, text) if name in kinds else (kind, given)
    return found


def _asset_attributes() -> Any:
    """Those attributes of Dagster's components that fit the output, with Dagster's templates."""
    fields = AssetsDefUpdateKwargs.model().model_fields
    created: Any = create_model  # see `_created`
    return created(
        "OutputAssetAttributes",
        __base__=OutputAssetAttributes,
        **{name: (fields[name].annotation, fields[name]) for name in ASSET_ATTRIBUTES},
    )


def _of_class(cls: type, **replaced: Any) -> Any:
    """Return the attributes of a dataclass. `replaced` has other types for some fields."""
    texts, module = field_descriptions(cls) | _TEXTS, vars(sys.modules[cls.__module__])
    fields = {}
    for field in dataclasses.fields(cls):
        kind = replaced.get(field.name) or _evaluated(field.type, module)
        is_required = field.default is field.default_factory is dataclasses.MISSING
        fields[field.name] = _field(
            kind, ... if is_required else field.default, texts.get(field.name, "")
        )
    return _created(f"{cls.__name__}Attributes", _summary(cls), cls, **fields)


def _evaluated(annotation: Any, module: Mapping[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        holder = types.SimpleNamespace(__annotations__={"kind": annotation})
        kind = get_type_hints(holder, dict(module), include_extras=True)["kind"]
    except NameError:  # a name for type checkers only; the constructor checks the value
        return Any
    return Reference if get_origin(kind) is Callable else kind


def _settings() -> Any:
    """The sections of the settings. `KinesisPipeline` has arguments for the others."""
    return _created(
        "SettingsAttributes",
        _SETTINGS_TEXT,
        dict,
        **{
            name: (section, Field(default_factory=_not_given, description=section.__doc__))
            for name, field in ConsumerSettings.model_fields.items()
            if (section := _section(field)) is not None
        },
        table_layout=_setting(ConsumerSettings.model_fields["table_layout"]),
        client_version_config=_setting(ConsumerSettings.model_fields["client_version_config"]),
        coordination=_setting(ConsumerSettings.model_fields["coordination"]),
    )


def _section(field: FieldInfo) -> Any:
    kind = field.annotation
    if not (isinstance(kind, type) and issubclass(kind, StrictSettings)):
        return None
    return _created(
        f"{kind.__name__}Attributes",
        _summary(kind).partition(" (protocol")[0],
        dict,
        **{name: _setting(one) for name, one in kind.model_fields.items()},
    )


def _setting(field: FieldInfo) -> tuple[Any, Any]:
    # The limits are those of the value, not of a template
    kind: Any = field.annotation
    if field.metadata:
        kind = Annotated[(kind, *field.metadata)]
    return _field(kind, field.default, field.description or "")


def _aws() -> Any:
    fields = {}
    for name, field in AwsResource.model_fields.items():
        text = (field.description or "").partition("; use an EnvVar")[0]
        if is_secret(name):
            text += ". Written as the name of an environment variable, such as {env: NAME}"
            fields[name] = _field(EnvironmentVariable | None, None, text)
        elif name != "max_attempts":  # always 1
            fields[name] = _field(field.annotation, field.default, text)
    return _created(
        "AwsAttributes", "Region, endpoint and credentials of AWS.", AwsResource, **fields
    )


def _created(
    title: str, text: str, target: Callable[..., Any], /, base: Any = Attributes, **fields: Any
) -> Any:
    created: Any = create_model  # its type for fields of any type is not known
    model = created(title, __base__=base, __doc__=text or base.__doc__, **fields)
    model.target = target
    return model


def _field(kind: Any, default: Any, description: str) -> tuple[Any, Any]:
    text = description.replace("None: ", "null: ")
    kinds = alternatives(kind)
    has_names = any(isinstance(one, type) and issubclass(one, Attributes) for one in kinds)
    if REFERENCE in str(kind):
        text = f"{text.rstrip('.')}. {_REFERENCE_TEXT}"
    elif kind is not Any and str not in kinds and not has_names:
        kind |= Template
    if default is ... or default is None or _is_plain(default):
        return kind, Field(default, description=text)
    return kind, Field(default_factory=_not_given, description=text)


def _is_plain(default: object) -> bool:
    """Return whether JSON can show a default. Attributes that are not given are not used."""
    return isinstance(default, str | int | float) and default not in (math.inf, -math.inf)


def _not_given() -> None:
    return None


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _summary(cls: type) -> str:
    return " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
