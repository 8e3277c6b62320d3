"""The parts of the interop suite that need no Java."""

from __future__ import annotations

import subprocess
from datetime import date

import pytest

from tests.interop import __main__ as command
from tests.interop.catalogue import CASES
from tests.interop.java import JavaKcl, fetch, version_in
from tests.interop.journal import JavaLog, count, lost_leases
from tests.interop.plans import PLANS
from tests.interop.report import BEGIN, END, keep_result, read_results, table, write
from tests.interop.result import Result

LOG = """\
@start
[main] WARN software.amazon.kinesis.coordinator.Scheduler - nothing to see
@initialize s-0 TRIM_HORIZON 0 -
@record s-0 1 a
@record s-0 1 b
@checkpoint s-0 1 49 0
@record s-0 2 c
@record s-0 2 d"""


@pytest.fixture
def log(tmp_path) -> JavaLog:
    path = tmp_path / "java-1.log"
    path.write_text(LOG)
    return JavaLog(path)


def test_a_line_counts_when_it_is_complete(log):
    log.poll(1.0)
    assert sorted(log.delivered()) == ["a", "b", "c"]
    log.path.write_text(LOG + "\n")
    log.poll(2.0)
    assert [(one.words[2], one.at) for one in log.seen("record")][-1] == ("d", 2.0)
    assert log.seen("record", since=1.5) == log.seen("record")[-1:]


def test_a_batch_of_java_is_processed_for_good_with_its_checkpoint(log):
    log.path.write_text(LOG + "\n")
    log.poll(1.0)
    found = count(["a", "b", "c", "d", "e"], {"a": 1, "c": 1}, [log])
    assert (found.sent, found.missing, found.repeated) == (5, {"e"}, {"a"})
    assert found.again == 2


@pytest.mark.parametrize(
    "line",
    [
        "[LAM] ERROR k.l.d.DynamoDBLeaseRefresher - Failed to deserialize lease with key s-0",
        "java.lang.NullPointerException: leaseCounter",
        "java.lang.IllegalArgumentException: Sequence number must not be null",
    ],
)
def test_a_row_that_java_cannot_read_is_noticed(log, line):
    log.path.write_text(f"{LOG}\n{line}\n")
    log.poll(1.0)
    assert log.unreadable == [line]


def test_a_lease_that_expired_is_told_from_one_that_was_handed_off():
    log = """\
2026-11-24 WARNING lease_lost worker_id=o lease_key=s-0 reason='it was not renewed in time'
2026-11-24 WARNING lease_lost worker_id=o lease_key=s-1 reason='the lease is not held any more'
2026-11-24 INFO handoff_completed lease_key=s-2 from_worker=o
2026-11-24 WARNING lease_lost worker_id=o lease_key=s-3 reason='another worker has it, or its row'
"""
    assert lost_leases(log) == {"s-0": 1, "s-3": 1}


def test_the_version_is_that_of_the_jar():
    jars = ["netty.jar", "amazon-kinesis-client-multilang.jar", "amazon-kinesis-client-3.5.1.jar"]
    assert version_in(jars) == "3.5.1"


def test_a_setting_of_a_later_version_is_not_given_to_an_older_one():
    keys = {family: set(JavaKcl(family, "", "").short_times()) for family in ("2.7", "3.1", "3.5")}
    assert not any(key.startswith("metrics") for key in keys["2.7"])
    assert keys["2.7"] < keys["3.1"] < keys["3.5"]


def test_without_jars_the_suite_says_why_and_passes(tmp_path, monkeypatch, capsys):
    def refused(*_, **__):
        return subprocess.CompletedProcess([], 1, "", "no such host\n")

    monkeypatch.setattr(subprocess, "run", refused)
    monkeypatch.setattr("shutil.which", lambda tool: f"/bin/{tool}")
    assert command.main(["--jars", str(tmp_path)]) == 0
    assert capsys.readouterr().err == "skipped: mvn failed: no such host\n"
    assert not (tmp_path / "3.5" / "ready").exists()


def test_a_missing_tool_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda tool: None)
    with pytest.raises(Exception, match="there is no java on PATH"):
        fetch(tmp_path, "3.5")


def test_plans_name_cases_that_exist():
    names = {case.name for case in CASES}
    assert len(names) == len(CASES)
    for plan in PLANS:
        assert {*plan.cases, *plan.short} <= names
        assert {*plan.short} <= {*plan.cases}


def result(case: str, *, passed: bool = True, measured: float | None = None) -> Result:
    return Result("three-ours", case, "3.5.1", passed, "", measured, 9.0, 1_200, 3)


def test_the_table_has_a_row_per_case_that_ran(tmp_path):
    results = [result("join", measured=6.4), result("merge", passed=False), result("foreign")]
    section = table(results, date(2026, 11, 24))
    rows = [line.split(" | ")[-1] for line in section.splitlines() if line.startswith("|")]
    assert rows[-3:] == ["6 s |", "failed |", "ok |"]
    assert section.startswith("Run of 2026-11-24, with kcl_pipeline ")
    assert "| A | three tables, ours first | 3.5.1 |" in section
    assert "1,200 records were sent; 3 deliveries were repetitions." in section
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    write(page, section)
    assert page.read_text() == f"before\n{BEGIN}\n{section}\n{END}\nafter\n"


def test_a_later_result_of_a_case_replaces_the_earlier_one(tmp_path):
    file = tmp_path / "results.json"
    assert read_results(file) == []
    for one in (result("join", passed=False), result("merge"), result("join")):
        keep_result(file, one)
    assert read_results(file) == [result("merge"), result("join")]
