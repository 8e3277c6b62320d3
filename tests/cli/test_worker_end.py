"""How `kcl-pipeline worker` ends: its exit code and its last line."""

import pytest
import typer

from kcl_pipeline.cli.worker import _report
from kcl_pipeline.worker.summary import StopReason, WorkerProgress, WorkerSummary

TOTAL = WorkerProgress("w-1", 1.0)


@pytest.mark.parametrize(("reason", "code"), [(StopReason.FAILED, 1), (StopReason.HUNG, 3)])
def test_a_worker_that_failed_or_was_hung_has_an_exit_code_of_its_own(reason, code, capsys):
    with pytest.raises(typer.Exit) as ended:
        _report("w-1", WorkerSummary(reason, TOTAL, "it was so"))
    assert ended.value.exit_code == code
    assert capsys.readouterr().err.splitlines()[-1] == "Error: it was so"


def test_a_worker_that_was_stopped_has_none(capsys):
    _report("w-1", WorkerSummary(StopReason.STOPPED, TOTAL))
    assert "w-1 stopped" in capsys.readouterr().err
