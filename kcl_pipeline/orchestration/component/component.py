"""Define `KinesisPipelineComponent`."""

import inspect
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import dagster as dg
from dagster.components import ComponentLoadContext, ComponentTypeSpec, ResolutionContext
from pydantic import BaseModel

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.orchestration.assets.names import python_name
from kcl_pipeline.orchestration.assets.specs import STREAM_GROUP
from kcl_pipeline.orchestration.component.resolution import resolved
from kcl_pipeline.orchestration.component.scaffold import PipelineScaffolder
from kcl_pipeline.orchestration.component.schema import component_attributes
from kcl_pipeline.pipeline import KinesisPipeline

_STREAM_OWNERS: Final[WeakKeyDictionary[object, dict[dg.AssetKey, str]]] = WeakKeyDictionary()
"""By code location, the pipeline whose component has the asset of a stream."""

_PIPELINES: Final[WeakKeyDictionary[object, dict[str, tuple[object, str]]]] = WeakKeyDictionary()
"""By code location and prefix of names in Dagster, the component of the prefix and its pipeline."""


@dg.scaffold_with(PipelineScaffolder)
class KinesisPipelineComponent(dg.Component, dg.Resolvable):
    """A `KinesisPipeline` as a component: assets, checks, jobs and the leader sensor.

    The attributes in `defs.yaml` are the arguments of `KinesisPipeline` and of
    `KinesisPipeline.definitions`. In `component.py`, pass the pipeline and the options.

    Args:
        pipeline: The pipeline.
        options: The arguments of `KinesisPipeline.definitions`.
    """

    def __init__(self, pipeline: KinesisPipeline, **options: Any) -> None:
        self.pipeline = pipeline
        self.options = options

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
        names = KinesisPipeline.__dataclass_fields__
        return cls(
            KinesisPipeline(**{name: one for name, one in given.items() if name in names}),
            **{name: one for name, one in given.items() if name not in names},
        )

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
        defs = self.pipeline.definitions(**self.options)
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
