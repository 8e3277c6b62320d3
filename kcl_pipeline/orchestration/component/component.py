"""Define `KinesisPipelineComponent`."""

import inspect
from typing import Any, Final, Self
from weakref import WeakKeyDictionary

import dagster as dg
from dagster.components import ComponentLoadContext, ComponentTypeSpec, ResolutionContext
from pydantic import BaseModel

from kcl_pipeline.errors import SettingsError
from kcl_pipeline.orchestration.assets.contract import DagsterOptions
from kcl_pipeline.orchestration.assets.names import python_name
from kcl_pipeline.orchestration.assets.specs import STREAM_GROUP
from kcl_pipeline.orchestration.component.resolution import resolved
from kcl_pipeline.orchestration.component.scaffold import PipelineScaffolder
from kcl_pipeline.orchestration.component.schema import component_attributes
from kcl_pipeline.orchestration.definitions import build_definitions
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
