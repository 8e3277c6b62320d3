"""Define the component, by which a `defs.yaml` describes a pipeline.

In reading order: attributes and how they are resolved, those of the component, the scaffold, and
`KinesisPipelineComponent`.
"""

import ast
import collections.abc
import dataclasses
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from itertools import pairwise
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Literal,
    Self,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)
from weakref import WeakKeyDictionary

import dagster as dg
import pyarrow as pa
from dagster.components import (
    ComponentLoadContext,
    ComponentTypeSpec,
    Scaffolder,
    ScaffoldRequest,
)
from dagster.components.resolved.base import derive_model_type, resolve_fields
from dagster.components.resolved.core_models import AssetsDefUpdateKwargs
from pydantic import BaseModel, ConfigDict, Field, create_model

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
from kcl_pipeline.settings_errors import is_secret
from kcl_pipeline.status.limits import CheckLimits

# Declare the attributes as classes that Dagster resolves.
#
# Fields, types, defaults and descriptions come from the classes that users write in Python. A new
# field of such a class is therefore also an attribute. Dagster derives the schema, in which each
# attribute can be a template, too, and names the line of a wrong one. A group of attributes is no
# template: with that choice, an error would not name the wrong attribute of the group.

_AWS_TEXT: Final = (
    "Region, endpoint and credentials, or the key of an AwsResource among your resources. null: "
    "the standard environment."
)
_SPARK_TEXT: Final = (
    "The key of a resource with a Spark session among your resources, or a template that returns "
    "one: a SparkResource, or a PySparkResource or LazyPySparkResource of dagster-pyspark. null: a "
    "SparkResource with spark_config, if the pipeline uses Spark."
)
_ASSET_TEXT: Final = (
    "Attributes of the output that replace those of this package; metadata and tags are merged. Or "
    "a template that returns a function of the AssetSpec of each asset."
)
_LIMITS_TEXT: Final = "When the checks fail. null: the defaults."
_TYPE_NAMES: Final = {"pa": pa, "DataFrame": Any, "AssetKey": Any}
"""What the classes import for type checkers only."""

Resolve = Callable[[dg.ResolutionContext, Any], Any]
"""Returns the value of an attribute."""


class Attributes(dg.Resolvable, dg.Model):
    """Attributes that are the arguments of `target`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    target: ClassVar[Callable[..., Any]]
    schema_model: ClassVar[type[BaseModel]]

    @classmethod
    def model(cls) -> type[BaseModel]:
        """Return the schema of the attributes."""
        return cls.schema_model

    @classmethod
    def resolve_from_model(cls, context: dg.ResolutionContext, model: BaseModel) -> Any:
        """Return what the attributes describe.

        Raises:
            SettingsError: The target refuses a value.
        """
        return cls.target(**resolve_fields(model, cls, context))


_CLASSES: Final[dict[type[BaseModel], type[Attributes]]] = {}
"""By schema, the attributes."""


def _attributes(name: str, target: Callable[..., Any], /, **fields: Any) -> type[Attributes]:
    created: Any = create_model  # its type for fields of any type is not known
    found: type[Attributes] = created(name, __base__=Attributes, **fields)
    derived, groups = derive_model_type(found), {}
    for field, (annotation, _) in fields.items():
        kind = get_args(annotation)[1].model_field_type
        if any(one in _CLASSES for one in _alternatives(kind)):
            groups[field] = kind, derived.model_fields[field]
    found.target, found.schema_model = target, created(name, __base__=derived, **groups)
    _CLASSES[found.schema_model] = found
    return found


def _of_dataclass(cls: type, **replaced: Any) -> dict[str, Any]:
    """Return an attribute for each field of a dataclass. `replaced` has others for some."""
    kinds, texts = get_type_hints(cls, localns=_TYPE_NAMES), field_descriptions(cls)
    fields = {}
    for field in dataclasses.fields(cls):
        is_required = field.default is field.default_factory is dataclasses.MISSING
        default = ... if is_required else field.default
        fields[field.name] = replaced.get(field.name) or _field(
            kinds[field.name], default, texts.get(field.name, "")
        )
    return fields


def field_descriptions(cls: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, by name."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(tree, ast.ClassDef)  # noqa: S101 (the source of a class)
    texts = {}
    for field, text in pairwise(tree.body):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                texts[name] = " ".join(doc.split())
    return texts


def _of_model(cls: type[BaseModel], **replaced: Any) -> dict[str, Any]:
    """Return an attribute for each field of a pydantic model. `replaced` has others for some."""
    return {
        name: replaced.get(name)
        or _field(field.rebuild_annotation(), field.default, field.description or "")
        for name, field in cls.model_fields.items()
    }


def _field(kind: Any, default: Any, text: str, resolve: Resolve | None = None) -> Any:
    """Return an attribute, as pydantic creates it.

    Args:
        kind: Its type in Python.
        default: Its default. `...`: it is required.
        text: Its description.
        resolve: Returns its value. None: by the kind.
    """
    kinds = [get_origin(one) or one for one in _alternatives(kind)]
    if Callable in kinds:
        text = f"{text.rstrip('.')}. A function is written as `module:function`."
    resolver = dg.Resolver(
        resolve or partial(_resolve, kinds),
        model_field_type=_in_schema(kind),
        description=text.replace("None: ", "null: "),
        inject_before_resolve=False,
    )
    if default is not ... and default is not None and not _is_plain(default):
        return Annotated[Any, resolver], Field(default_factory=dict)
    return Annotated[Any, resolver], default


def _is_plain(default: object) -> bool:
    """Return whether JSON can show a default. Attributes that are not given are not used."""
    return isinstance(default, str | int | float) and default not in (math.inf, -math.inf)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _in_schema(kind: Any) -> Any:
    """Return the type of an attribute: a class has attributes, and a function has an address."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _attributes(kind.__name__, kind, **_of_dataclass(kind)).model()
    match get_origin(kind), get_args(kind):
        case collections.abc.Callable, _:
            return str
        case collections.abc.Sequence, (item,):
            return types.GenericAlias(list, (_in_schema(item),))
        case ((typing.Union | types.UnionType), members):
            return Union[tuple(map(_in_schema, members))]  # noqa: UP007 (of a computed tuple)
    return kind


def _resolve(kinds: Sequence[Any], context: dg.ResolutionContext, value: Any) -> Any:
    """Return the value of an attribute, with its templates rendered.

    Args:
        kinds: Its types, without the types of items.
        context: Scope of the templates.
        value: The attribute.

    Raises:
        ResolutionException: A value is wrong, or a function does not exist. It has the line.
    """
    try:
        return _resolved(kinds, context, value)
    except SettingsError as error:
        name = str(context.path[-1])
        raise context.build_resolve_fn_exc([str(error)], name, value) from error


def _resolved(kinds: Sequence[Any], context: dg.ResolutionContext, value: Any) -> Any:
    if isinstance(value, BaseModel):
        return _CLASSES[type(value)].resolve_from_model(context, value)
    if isinstance(value, Mapping):
        return {key: _resolved([str], context.at_path(key), one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_resolved([str], context.at_path(i), one) for i, one in enumerate(value)]
    if not isinstance(value, str):
        return value
    # Dagster also converts strings without a template: "1.1" becomes a number
    if "{{" in value or "{%" in value:
        if {str, Literal} & set(kinds) and Any not in kinds:  # a number remains a string, too
            return str(context.resolve_value(f"text:{value}")).removeprefix("text:")
        value = context.resolve_value(value)
    if not isinstance(value, str):
        return value
    if Callable in kinds:
        name = ".".join(map(str, context.path)).removeprefix("attributes.")
        return load_object(name, value)
    return _time(value) if datetime in kinds else value


def _time(text: str) -> datetime | str:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return text  # the constructor refuses it, with its name


def _summary(cls: type) -> str:
    text = (inspect.getdoc(cls) or "").partition("\n\n")[0]
    return " ".join(text.partition(" (protocol")[0].split())


# The attributes of the component: those of the pipeline and those of the definitions.


def _sink(**forms: Any) -> Any:
    given = [sink for sink in forms.values() if sink is not None]
    if len(given) != 1:
        written = ", ".join(forms) or "nothing"
        raise SettingsError(
            f"sink has {written}. Write one of delta (a DeltaSink), foreach_arrow (a "
            "ForeachArrowSink) and foreach_batch (a ForeachBatchSink)."
        )
    return given[0]


def _variable(env: str) -> dg.EnvVar:
    return dg.EnvVar(env)


def _settings() -> type[Attributes]:
    """The sections of the settings. `KinesisPipeline` has arguments for the others."""
    fields, sections = ConsumerSettings.model_fields, {}
    for name, field in fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, StrictSettings):
            section = _attributes(kind.__name__, dict, **_of_model(kind))
            sections[name] = _field(section.model(), {}, _summary(kind))
    names = ("table_layout", "client_version_config", "coordination")
    others = {name: one for name, one in _of_model(ConsumerSettings).items() if name in names}
    return _attributes("Settings", dict, **sections, **others)


def _aws() -> type[Attributes]:
    variable = _attributes(
        "EnvironmentVariable",
        _variable,
        env=_field(str, ..., "Name of the variable. The Dagster UI shows only the name"),
    )
    secrets = {}
    for name, field in AwsResource.model_fields.items():
        if is_secret(name):
            text = (field.description or "").partition("; use an EnvVar")[0]
            text += ". Written as the name of an environment variable, such as {env: NAME}"
            secrets[name] = _field(variable.model() | None, None, text)
    fields = _of_model(AwsResource, **secrets)
    del fields["max_attempts"]  # always 1
    return _attributes("Aws", AwsResource, **fields)


@cache
def component_attributes() -> type[Attributes]:
    """Return the attributes of `KinesisPipelineComponent`."""
    forms = {
        "delta": DeltaSink,
        "foreach_arrow": ForeachArrowSink,
        "foreach_batch": ForeachBatchSink,
    }
    sink = _attributes(
        "Sink",
        _sink,
        **{name: _field(cls | None, None, _summary(cls)) for name, cls in forms.items()},
    )
    text = "Settings by section, with the names of KCL in snake_case."
    pipeline = _of_dataclass(
        KinesisPipeline,
        sink=_field(sink.model() | None, None, field_descriptions(KinesisPipeline)["sink"]),
        settings_overrides=_field(_settings().model(), {}, text),
    )
    asset = _attributes(
        "OutputAsset",
        dict,
        **{
            name: (kind, None)
            for name, kind in get_type_hints(AssetsDefUpdateKwargs, include_extras=True).items()
            if name in ASSET_ATTRIBUTES
        },
    )
    options = _of_model(
        DagsterOptions,
        aws=_field(_aws().model() | str | None, None, _AWS_TEXT, partial(_resolve, [])),
        spark=_field(str | None, None, _SPARK_TEXT, partial(_resolve, [])),
        asset_attributes=_field(
            asset.model() | str | None, None, _ASSET_TEXT, partial(_resolve, [])
        ),
        check_limits=_field(CheckLimits | None, None, _LIMITS_TEXT),
    )
    return _attributes("KinesisPipelineComponent", dict, **pipeline, **options)


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
        return component_attributes().model()

    @classmethod
    def resolve_from_model(cls, context: dg.ResolutionContext, model: BaseModel) -> Self:
        """Build the component from its attributes.

        Raises:
            SettingsError: An attribute is wrong, or a function does not exist.
        """
        given = component_attributes().resolve_from_model(context, model)
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
