"""Tables with features: those that a commit cannot serve are refused at the start, by name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from kcl_pipeline.batch import Batch
from kcl_pipeline.cli.doctor.sink import check_output
from kcl_pipeline.delta.files import ArrowBatchWriter
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.errors import TableMismatchError
from kcl_pipeline.status.findings import FindingLevel
from tests.support.delta_tables import commit_entries, committer, entry

READER_TOO = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "v2Checkpoint",
    "vacuumProtocolCheck",
    "variantType",
}


def table_with(
    uri: Path,
    features: Sequence[str],
    *,
    reader: Sequence[str] | None = None,
    configuration: Mapping[str, str] | None = None,
    writer_version: int = 7,
) -> str:
    """Create a table whose log names these features, as another engine writes it."""
    DeltaTable.create(str(uri), pa.schema([("id", pa.int64())]))
    entry = uri / "_delta_log/00000000000000000000.json"
    read = [one for one in features if one in READER_TOO] if reader is None else list(reader)
    protocol: dict[str, object] = {
        "minReaderVersion": 3 if read else 1,
        "minWriterVersion": writer_version,
    }
    if writer_version == 7:
        protocol["writerFeatures"] = list(features)
    if read:
        protocol["readerFeatures"] = read
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            action["protocol"] = protocol
        if "metaData" in action:
            action["metaData"]["configuration"] = dict(configuration or {})
    entry.write_text("".join(json.dumps(action) + "\n" for action in actions))
    return str(uri)


@pytest.mark.parametrize(
    "feature",
    [
        "clustering",
        "domainMetadata",
        "rowTracking",
        "identityColumns",
        "generatedColumns",
        "inCommitTimestamp",
        "icebergCompatV1",
        "icebergCompatV2",
        "allowColumnDefaults",
        "vacuumProtocolCheck",
        "typeWidening",
        "variantType",
        "checkpointProtection",
        "aFeatureOfTheFuture",
    ],
)
def test_a_feature_that_is_not_served_is_refused_by_name(tmp_path: Path, feature: str) -> None:
    uri = table_with(tmp_path / "t", ["appendOnly", feature])
    with pytest.raises(TableMismatchError, match=f"has the table features {feature}, which"):
        committer(uri).check()
    assert DeltaTable(uri).version() == 0


@pytest.mark.parametrize("feature", ["catalogManaged", "aFeatureOfTheFuture"])
def test_a_table_that_delta_rs_cannot_open_is_refused_by_name(tmp_path: Path, feature: str) -> None:
    uri = table_with(tmp_path / "t", [feature], reader=[feature])
    with pytest.raises(TableMismatchError, match=f"has the table features {feature}, which"):
        committer(uri).check()


@pytest.mark.parametrize(
    ("feature", "configuration"),
    [
        ("appendOnly", {"delta.appendOnly": "true"}),
        ("changeDataFeed", {"delta.enableChangeDataFeed": "true"}),
        ("checkConstraints", {}),
        ("columnMapping", {}),
        ("deletionVectors", {"delta.enableDeletionVectors": "true"}),
        ("invariants", {}),
        ("timestampNtz", {}),
        ("v2Checkpoint", {"delta.checkpointPolicy": "v2"}),
    ],
)
def test_a_feature_that_is_served_is_committed_to(
    tmp_path: Path, feature: str, configuration: Mapping[str, str]
) -> None:
    uri = table_with(tmp_path / "t", [feature], configuration=configuration)
    sink = committer(uri)
    assert sink.check() == 0
    rows = pa.table({"id": pa.array([1], pa.int64())})
    batch = ArrowBatchWriter(None, uri).write(Batch("b", (), rows))
    table_id = sink.positions(["a"]).table_id
    assert commit_entries(sink, table_id, batch, [entry("a", 1)]).version == 1
    assert committer(uri).positions(["a"]).shards["a"].number == 1
    assert DeltaTable(uri).count() == 1, "pyarrow does not read all of these tables"


def test_a_writer_version_of_the_future_is_refused(tmp_path: Path) -> None:
    uri = table_with(tmp_path / "t", [], writer_version=9)
    with pytest.raises(TableMismatchError, match="has the writer version 9, which"):
        committer(uri).check()


def test_a_table_that_does_not_exist_can_be_created(tmp_path: Path) -> None:
    assert committer(str(tmp_path / "t")).check() is None
    assert not (tmp_path / "t").exists()


def test_doctor_opens_the_table(tmp_path: Path) -> None:
    def finding(uri: object, **settings: object) -> tuple[FindingLevel, str]:
        (found,) = check_output(DeltaSink(str(uri), **settings), "app")  # type: ignore[arg-type]
        assert found.name == "output table"
        return found.level, found.sentence

    level, text = finding(tmp_path / "none")
    assert (level, "does not exist yet" in text) == (FindingLevel.OK, True)
    good = table_with(tmp_path / "good", ["appendOnly"])
    assert finding(good) == (FindingLevel.OK, f"{good}: version 0 can be written")
    bad = table_with(tmp_path / "bad", ["clustering"])
    level, text = finding(bad)
    assert level is FindingLevel.PROBLEM
    assert "the table features clustering" in text
    level, text = finding(good, partition_by=["day"])
    assert level is FindingLevel.PROBLEM
    assert "partition_by=['day'] does not fit" in text
    (tmp_path / "good/_delta_log/00000000000000000000.json").write_text("no log")
    assert finding(good)[0] is FindingLevel.PROBLEM
    assert list(check_output(object(), "app")) == []
