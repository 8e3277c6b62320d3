"""Write a new component: `dg scaffold defs kcl_pipeline.KinesisPipelineComponent NAME`."""

from typing import Any, Final

from dagster.components import Scaffolder, ScaffoldRequest
from pydantic import BaseModel, Field

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
