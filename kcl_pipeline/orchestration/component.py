"""Define the component, by which a `defs.yaml` describes a pipeline.

In reading order: descriptions of fields, the schema of the attributes, the objects that they
describe, the scaffold, and `KinesisPipelineComponent`.
"""

import ast
import dataclasses
import inspect
import math
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache
from itertools import pairwise
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from weakref import WeakKeyDictionary

import dagster as dg
from dagster.components import (
    ComponentLoadContext,
    ComponentTypeSpec,
    ResolutionContext,
    Scaffolder,
    ScaffoldRequest,
)
from dagster.components.resolved.core_models import (
    AssetsDefUpdateKwargs,
    resolve_assets_def_update_kwargs_to_mapping,
)
from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.fields import FieldInfo

from kcl_pipeline.arguments import load_object
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.config.model import StrictSettings
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.foreach import ForeachArrowSink, ForeachBatchSink
from kcl_pipeline.orchestration.definitions import build_definitions
from kcl_pipeline.orchestration.names import python_name
from kcl_pipeline.orchestration.options import ASSET_ATTRIBUTES, DagsterOptions
from kcl_pipeline.orchestration.resources import AwsResource
from kcl_pipeline.orchestration.specs import STREAM_GROUP
from kcl_pipeline.pipeline import KinesisPipeline
from kcl_pipeline.pipeline.arguments import Fleet
from kcl_pipeline.settings_errors import is_secret
from kcl_pipeline.status.limits import CheckLimits
from kcl_pipeline.stream_config import StreamConfig, StreamSelector

# Read the descriptions of fields from the source.
#
# The schema of the component shows them. They are written once, as docstrings.


def field_descriptions(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, by name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)  # noqa: S101 (the source of a class)
    return dict(_documented(tree.body))


def _documented(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for field, text in pairwise(body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                yield name, _one_line(doc)


def _one_line(text: str) -> str:
    return " ".join(text.split())


# Build the schema of the attributes of the component.
#
# Fields, types, defaults and descriptions come from the classes that users write in Python. A new
# field of such a class is therefore also an attribute.

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


# Turn attributes into the objects that they describe.

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


# Write a new component: `dg scaffold defs kcl_pipeline.KinesisPipelineComponent NAME`.

_YAML: Final = """\
type: {type_name}

attributes:
  name: {name}
  streams:
    - {stream}
  sink:
    delta:
      uri: {table}
  # A function of a pyarrow.Table, or transform: a function of a Spark DataFrame
  # transform_arrow: my_project.{name}:per_minute
  workers:
    min: 1
    max: 8
  # settings_overrides:
  #   lease:
  #     failover_time_millis: 10000
"""

_PYTHON: Final = '''\
"""The component of the pipeline {name}."""

import dagster as dg

from kcl_pipeline import DeltaSink, Fleet, KinesisPipeline, KinesisPipelineComponent


@dg.component_instance
def load(context: dg.ComponentLoadContext) -> KinesisPipelineComponent:
    """Return the component."""
    return KinesisPipelineComponent(
        KinesisPipeline(
            name="{name}",
            streams=["{stream}"],
            sink=DeltaSink("{table}"),
            workers=Fleet(min=1, max=8),
        )
    )
'''


class PipelineParams(BaseModel):
    """What `dg scaffold defs` asks for."""

    name: str | None = Field(
        None, description="Name of the KCL application. Default: the name of the folder"
    )
    stream: str | None = Field(
        None, description="Name or ARN of the stream. Default: the name of the application"
    )
    table: str | None = Field(
        None, description="Address of the Delta table. Default: lake/ and the name"
    )


class PipelineScaffolder(Scaffolder[PipelineParams]):
    """Write `defs.yaml` or `component.py`."""

    @classmethod
    def get_scaffold_params(cls) -> type[PipelineParams]:
        """Return the parameters."""
        return PipelineParams

    def scaffold(self, request: ScaffoldRequest[PipelineParams]) -> None:
        """Write the file of the request."""
        path, params = request.target_path, request.params
        folder = path.parent.name if request.append else path.name
        name = params.name or folder
        values: dict[str, Any] = {
            "type_name": request.type_name,
            "name": name,
            "stream": params.stream or name,
            "table": params.table or f"lake/{name}",
        }
        if request.scaffold_format == "python":
            (path / "component.py").write_text(_PYTHON.format(**values), encoding="utf-8")
        elif request.append:
            with path.open("a", encoding="utf-8") as file:
                file.write(f"---\n{_YAML.format(**values)}")
        else:
            (path / "defs.yaml").write_text(_YAML.format(**values), encoding="utf-8")


# Define `KinesisPipelineComponent`.

_STREAM_OWNERS: Final[WeakKeyDictionary[object, dict[dg.AssetKey, str]]] = WeakKeyDictionary()
"""By code location, the pipeline whose component has the asset of a stream."""

_PIPELINES: Final[WeakKeyDictionary[object, dict[str, tuple[object, str]]]] = WeakKeyDictionary()
"""By code location and prefix of names in Dagster, the component of the prefix and its pipeline."""


@dg.scaffold_with(PipelineScaffolder)
class KinesisPipelineComponent(dg.Component, dg.Resolvable):
    """A `KinesisPipeline` as a component: assets, checks, jobs and the leader sensor.

    The attributes in `defs.yaml` are the arguments of `KinesisPipeline` and of
    `KinesisPipeline.definitions`. In `component.py`, pass the pipeline and the options.

    To change the specs of the assets, write `asset_attributes`, or override `get_asset_spec`.

    Example:
        >>> import dagster as dg
        >>> from kcl_pipeline import KinesisPipelineComponent
        >>> class OrdersComponent(KinesisPipelineComponent):
        ...     def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        ...         return spec.merge_attributes(tags={"team": "shop"})

    Args:
        pipeline: The pipeline.
        options: The fields of `DagsterOptions`, by name.

    Raises:
        SettingsError: An option is wrong.
    """

    def __init__(self, pipeline: KinesisPipeline, **options: Any) -> None:
        self.pipeline = pipeline
        self.options = DagsterOptions(**options)

    @classmethod
    def model(cls) -> type[BaseModel]:
        """Return the schema of the attributes."""
        return component_attributes()

    @classmethod
    def resolve_from_model(cls, context: ResolutionContext, model: BaseModel) -> Self:
        """Build the component from its attributes.

        Raises:
            SettingsError: An attribute is wrong, or a function does not exist.
        """
        given = resolved(context, model)
        options = {name: given.pop(name) for name in DagsterOptions.model_fields if name in given}
        return cls(KinesisPipeline(**given), **options)

    def get_asset_spec(self, spec: dg.AssetSpec) -> dg.AssetSpec:
        """Return the spec of an asset: the output, a stream or the fleet.

        Args:
            spec: The spec with the options and `asset_attributes`. Its key must not change.
        """
        return spec

    @classmethod
    def get_spec(cls) -> ComponentTypeSpec:
        """Describe the component to `dg` and the Dagster UI."""
        return ComponentTypeSpec(
            description="A Kinesis Client Library application: streams to a sink, exactly once "
            "into Delta.",
            tags=["aws", "kinesis", "spark", "delta"],
            produces=["asset", "asset_check", "job", "sensor", "resource"],
        )

    def build_defs(self, context: ComponentLoadContext) -> dg.Definitions:
        """Build the definitions of the pipeline.

        A stream that another component of the code location reads too is among the definitions of
        one of them. Dagster adds the file of the component to each asset and refuses two assets
        that differ.

        Raises:
            SettingsError: Another component has a pipeline with this name.
        """
        self._refuse_same_name(context)
        defs = build_definitions(self.pipeline, self.options, self.get_asset_spec)
        owners = _STREAM_OWNERS.setdefault(context.component_tree.state_tracker, {})
        assets = [
            asset
            for asset in defs.assets or ()
            if not (isinstance(asset, dg.AssetSpec) and asset.group_name == STREAM_GROUP)
            or owners.setdefault(asset.key, self.pipeline.name) == self.pipeline.name
        ]
        fields = inspect.signature(dg.Definitions).parameters
        return dg.Definitions(**{name: getattr(defs, name) for name in fields} | {"assets": assets})

    def _refuse_same_name(self, context: ComponentLoadContext) -> None:
        """Refuse a second pipeline of this name; Dagster would name only a resource of both."""
        place, name = context.component_path, self.pipeline.name
        pipelines = _PIPELINES.setdefault(context.component_tree.state_tracker, {})
        other, other_name = pipelines.setdefault(python_name(name), (place, name))
        if other == place:
            return
        same = "" if name == other_name else f" ({other_name!r} is the same name in Dagster)"
        raise SettingsError(
            f"name={name!r} is the name of another pipeline in this code location{same}. "
            "Write another name, or remove one of the two."
        )
