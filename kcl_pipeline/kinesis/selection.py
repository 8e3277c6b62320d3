"""Find the streams of an account and region by name prefix and tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kcl_pipeline.clock import Clock
from kcl_pipeline.kinesis.boto import kinesis_errors

if TYPE_CHECKING:
    from mypy_boto3_kinesis import KinesisClient as BotoKinesisClient

PAUSE_SECONDS: Final = 0.25
"""Between two calls. AWS allows 5 calls of ListStreams and of ListTagsForStream per second."""

KEEP_TAGS_SECONDS: Final = 600.0
"""Tags of a stream are requested again after this time."""


class StreamFinder:
    """Lists streams. Not thread-safe.

    Args:
        client: The boto3 client.
        clock: Clock of the waits between calls.
        prefix: The names begin with this.
        tags: Every stream has these tags. Empty: tags are not requested.
    """

    def __init__(
        self, client: BotoKinesisClient, clock: Clock, prefix: str, tags: Mapping[str, str]
    ) -> None:
        self._client = client
        self._clock = clock
        self._prefix = prefix
        self._tags = dict(tags)
        self._known: dict[tuple[str, object], tuple[float, bool]] = {}

    def find(self) -> tuple[str, ...]:
        """Return the names of the streams that exist now, sorted.

        Raises:
            AwsError: A call failed.
        """
        found = [summary for summary in self._listed() if self._is_selected(summary)]
        return tuple(sorted(str(summary["StreamName"]) for summary in found))

    def _listed(self) -> list[dict[str, Any]]:
        summaries: list[dict[str, Any]] = []
        request: dict[str, Any] = {}
        while True:
            with kinesis_errors("ListStreams", "all streams"):
                page: Any = self._client.list_streams(**request)
            named = ({"StreamName": name} for name in page["StreamNames"])
            summaries += page.get("StreamSummaries") or named
            if not page["HasMoreStreams"]:
                return summaries
            request = {"ExclusiveStartStreamName": page["StreamNames"][-1]}
            self._clock.sleep(PAUSE_SECONDS)

    def _is_selected(self, summary: Mapping[str, Any]) -> bool:
        name = str(summary["StreamName"])
        if not name.startswith(self._prefix) or summary.get("StreamStatus") == "DELETING":
            return False
        if not self._tags:
            return True
        key, now = (name, summary.get("StreamCreationTimestamp")), self._clock.monotonic()
        known = self._known.get(key)
        if known is None or now - known[0] >= KEEP_TAGS_SECONDS:
            known = self._known[key] = (now, self._has_tags(name))
        return known[1]

    def _has_tags(self, name: str) -> bool:
        found: dict[str, str] = {}
        request: dict[str, Any] = {"StreamName": name}
        while True:
            self._clock.sleep(PAUSE_SECONDS)
            with kinesis_errors("ListTagsForStream", name):
                page: Any = self._client.list_tags_for_stream(**request)
            tags = page["Tags"]
            found |= {tag["Key"]: tag.get("Value", "") for tag in tags}
            if not page["HasMoreTags"] or not tags:
                return self._tags.items() <= found.items()
            request["ExclusiveStartTagKey"] = tags[-1]["Key"]
