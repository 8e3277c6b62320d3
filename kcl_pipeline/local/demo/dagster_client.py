"""GraphQL client for the demonstration's actions in the Dagster UI.

It lists runs, launches runs and terminates runs, as a user does in the Dagster UI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests

RUNS = """query Runs($filter: RunsFilter) { runsOrError(filter: $filter, limit: 100) { ...
  on Runs { results { runId status tags { key value } } } } }"""
LAUNCH = """mutation Launch($params: ExecutionParams!) { launchRun(executionParams: $params)
  { __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError {
  message } ... on RunConfigValidationInvalid { errors { message } } } }"""
TERMINATE = """mutation Terminate($run: String!) { terminateRun(runId: $run) { __typename ...
  on TerminateRunFailure { message } ... on PythonError { message } } }"""
MATERIALIZATIONS = """query Events($run: ID!) { runOrError(runId: $run) { ... on Run {
  assetMaterializations { metadataEntries { label ... on IntMetadataEntry {
  intValue } ... on FloatMetadataEntry { floatValue } } } } } }"""
STARTED = re.compile(r"Started process for run \(pid: (\d+)\)")
ASSET_JOB = "__ASSET_JOB"
MESSAGES = """query Messages($run: ID!) { logsForRun(runId: $run, limit: 50) { ... on
  EventConnection { events { ... on MessageEvent { message } } } } }"""
SENSOR = """query Sensor($selector: SensorSelector!) { sensorOrError(sensorSelector:
  $selector) { __typename ... on Sensor { id } } }"""
STOP_SENSOR = """mutation Stop($id: String!) { stopSensor(id: $id) { __typename ... on
  PythonError { message } } }"""
LOCATIONS = """query { workspaceOrError { ... on Workspace { locationEntries { name loadStatus
  locationOrLoadError { __typename ... on RepositoryLocation { repositories { name
  } } ... on PythonError { message } } } } } }"""


@dataclass(frozen=True, slots=True)
class Run:
    """One worker run.

    Attributes:
        run_id: Dagster's id of the run.
        status: Dagster's status of the run.
        tags: Tag values by key.
    """

    run_id: str
    status: str
    tags: Mapping[str, str]


class DagsterClient:
    """Client of Dagster's GraphQL endpoint.

    All methods raise the errors below.

    Args:
        url: Address of the Dagster webserver.

    Raises:
        requests.RequestException: The webserver cannot be reached.
        RuntimeError: Dagster reports an error; the text contains Dagster's message.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._session = requests.Session()
        # Dagster runs on this host, which a proxy cannot reach
        self._session.trust_env = False

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """Return the answer to a GraphQL query.

        Raises:
            RuntimeError: Dagster answered with an error.
        """
        answer = self._session.post(
            f"{self.url}/graphql", json={"query": query, "variables": variables}, timeout=30
        )
        answer.raise_for_status()
        body = answer.json()
        if body.get("errors"):
            raise RuntimeError(f"Dagster answered: {body['errors'][0]['message']}")
        data: dict[str, Any] = body["data"]
        return data

    def loaded(self) -> tuple[str, str] | None:
        """Return the code location and its repository, or None while the code is not loaded.

        Raises:
            RuntimeError: Dagster cannot load the code.
        """
        entries = self.ask(LOCATIONS)["workspaceOrError"].get("locationEntries", [])
        for entry in entries:
            found = entry["locationOrLoadError"] or {}
            if found.get("__typename") == "PythonError":
                raise RuntimeError(f"Dagster cannot load {entry['name']}: {found['message']}")
            if found.get("repositories"):
                return entry["name"], found["repositories"][0]["name"]
        return None

    def runs(self, job: str) -> list[Run]:
        """Return the runs of a job, newest first, at most 100."""
        results = self.ask(RUNS, filter={"pipelineName": job})["runsOrError"]["results"]
        return [
            Run(r["runId"], r["status"], {t["key"]: t["value"] for t in r["tags"]}) for r in results
        ]

    def status(self, run_id: str) -> str:
        """Return Dagster's status of a run, or an empty string when the run does not exist."""
        results = self.ask(RUNS, filter={"runIds": [run_id]})["runsOrError"]["results"]
        return str(results[0]["status"]) if results else ""

    def launch(
        self,
        location: str,
        repository: str,
        job: str,
        run_config: Mapping[str, Any],
        tags: Mapping[str, str],
    ) -> str:
        """Launch a run, as the Launchpad does, and return its id."""
        return self._launch(self._selector(location, repository, job), run_config, tags)

    def materialize(self, location: str, repository: str, asset: Sequence[str]) -> str:
        """Materialize an asset, as the Materialize button does, and return the run id.

        Args:
            location: Name of the code location.
            repository: Name of the repository.
            asset: Path of the asset key.
        """
        selector = self._selector(location, repository, ASSET_JOB)
        return self._launch(
            {**selector, "assetSelection": [{"path": list(asset)}], "assetCheckSelection": []},
            {},
            {},
        )

    def _selector(self, location: str, repository: str, job: str) -> dict[str, Any]:
        return {
            "repositoryLocationName": location,
            "repositoryName": repository,
            "pipelineName": job,
        }

    def _launch(
        self, selector: Mapping[str, Any], run_config: Mapping[str, Any], tags: Mapping[str, str]
    ) -> str:
        metadata = {"tags": [{"key": key, "value": value} for key, value in tags.items()]}
        answer = self.ask(
            LAUNCH,
            params={
                "selector": selector,
                "runConfigData": run_config,
                "executionMetadata": metadata,
            },
        )["launchRun"]
        if answer["__typename"] != "LaunchRunSuccess":
            raise RuntimeError(f"Dagster did not launch {selector['pipelineName']}: {answer}")
        return str(answer["run"]["runId"])

    def terminate(self, run_id: str) -> None:
        """Terminate a run, as the Terminate button does.

        Dagster interrupts the run. The run ends when it has finished its cleanup.
        """
        answer = self.ask(TERMINATE, run=run_id)["terminateRun"]
        if answer["__typename"] != "TerminateRunSuccess":
            raise RuntimeError(f"Dagster did not terminate {run_id}: {answer}")

    def stop_sensor(self, location: str, repository: str, sensor: str) -> None:
        """Stop a sensor, so that it starts no more workers."""
        state = self.ask(
            SENSOR,
            selector={
                "repositoryLocationName": location,
                "repositoryName": repository,
                "sensorName": sensor,
            },
        )["sensorOrError"]
        answer = self.ask(STOP_SENSOR, id=state["id"])["stopSensor"]
        if answer["__typename"] != "StopSensorMutationResult":
            raise RuntimeError(f"Dagster did not stop the sensor {sensor}: {answer}")

    def pid_of(self, run_id: str) -> int | None:
        """Return the process id of a run from its event log, or None before the process starts."""
        events = self.ask(MESSAGES, run=run_id)["logsForRun"].get("events", [])
        found = [match for event in events if (match := STARTED.search(event.get("message", "")))]
        return int(found[-1].group(1)) if found else None

    def sum_of(self, run_id: str, label: str) -> float:
        """Return the sum of one numeric metadata entry over all materializations of a run."""
        found = self.ask(MATERIALIZATIONS, run=run_id)["runOrError"].get(
            "assetMaterializations", []
        )
        entries = [
            entry for one in found for entry in one["metadataEntries"] if entry["label"] == label
        ]
        return float(
            sum(entry.get("intValue") or entry.get("floatValue") or 0 for entry in entries)
        )
