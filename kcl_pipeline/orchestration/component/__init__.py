"""The Dagster component: a pipeline that a `defs.yaml` file describes."""

from kcl_pipeline.orchestration.component.component import KinesisPipelineComponent

__all__ = ["KinesisPipelineComponent"]
