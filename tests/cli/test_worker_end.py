"""How `kcl-pipeline worker` ends: its exit code and its last line."""

import pytest
import typer

from kcl_pipeline.cli.worker import _report, as_dict
from kcl_pipeline.worker.summary import StopReason, WorkerSummary
from kcl_pipeline.worker_status import WorkerStatus, WorkerTotals

TOTAL = WorkerStatus(totals=WorkerTotals(1.0))


@pytest.mark.parametrize(
    ("reason", "code"),
    [
        (StopReason.FAILED, 1),
        (StopReason.HUNG, 3),
        (StopReason.ID_TAKEN, 4),
        (StopReason.USELESS, 5),
    ],
)
def test_a_worker_that_failed_or_was_hung_has_an_exit_code_of_its_own(reason, code, capsys):
    with pytest.raises(typer.Exit) as ended:
        _report("w-1", WorkerSummary("w-1", reason, TOTAL, "it was so"))
    assert ended.value.exit_code == code
    assert capsys.readouterr().err.splitlines()[-1] == "Error: it was so"


def test_a_worker_that_was_stopped_has_none(capsys):
    _report("w-1", WorkerSummary("w-1", StopReason.STOPPED, TOTAL))
    assert "w-1 stopped" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("reason", "sentence"),
    [
        (StopReason.STOPPED, "the worker was stopped before all records were read"),
        (StopReason.DRAIN_REQUESTED, "the worker was asked to end before all records were read"),
        (StopReason.APPLICATION_PAUSED, "the application was paused before all records were read"),
    ],
)
def test_a_drain_that_ends_before_all_records_are_read_fails(reason, sentence, capsys):
    summary = WorkerSummary("w-1", reason, TOTAL)
    with pytest.raises(typer.Exit) as ended:
        _report("w-1", summary, is_drain=True)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err.splitlines()[-1] == f"Error: {sentence}"
    assert as_dict("w-1", "orders", summary, is_drain=True)["error"] == sentence
    assert as_dict("w-1", "orders", summary, is_drain=False)["error"] is None


@pytest.mark.parametrize(("batches", "text"), [(1, "1,200 records in 1 batch"), (2, "2 batches")])
def test_the_last_line_counts_in_plain_english(batches, text, capsys):
    total = WorkerStatus(totals=WorkerTotals(1.0, records=1_200, batches=batches))
    _report("w-1", WorkerSummary("w-1", StopReason.DRAINED, total))
    assert capsys.readouterr().err.splitlines()[-1].endswith(text)


@pytest.mark.parametrize(
    ("elsewhere", "text"),
    [
        ({"w-2": 1}, "1 shard is held by other workers, which read its records: w-2 (1)"),
        (
            {"w-2": 1, "w-3": 3},
            "4 shards are held by other workers, which read their records: w-3 (3), w-2 (1)",
        ),
        (
            {f"w-{number}": 2 for number in range(8)},
            (
                "16 shards are held by other workers, which read their records: w-0 (2), w-1 (2), "
                "w-2 (2), w-3 (2), w-4 (2) and 3 more workers"
            ),
        ),
        ({"w\n2": 1}, "1 shard is held by other workers, which read its records: w\\n2 (1)"),
    ],
)
def test_a_drain_says_what_it_leaves_to_other_workers(elsewhere, text, capsys):
    summary = WorkerSummary("w-1", StopReason.DRAINED, TOTAL, elsewhere=elsewhere)
    _report("w-1", summary)
    assert capsys.readouterr().err.splitlines()[-1] == text
    assert as_dict("w-1", "app", summary)["elsewhere"] == elsewhere
