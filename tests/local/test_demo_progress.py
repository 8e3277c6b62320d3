"""The progress lines of the demonstration."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

from kcl_pipeline.local.demo.run import Demo, DemoOptions
from tests.support.dagster_fakes import ManualClock


def test_a_line_that_says_nothing_new_is_printed_twice_a_minute(tmp_path):
    clock, lines = ManualClock(), []
    demo = Demo(DemoOptions(folder=tmp_path), clock, lines.append)
    demo.tables = SimpleNamespace(
        lease=SimpleNamespace(list_leases=lambda: SimpleNamespace(leases=()))
    )
    demo.publisher = SimpleNamespace(counts=Counter(telemetry=560))

    def progress(seconds: float, note: str = "waiting for the table") -> list[str]:
        """The lines of so many seconds, with a call every half a second."""
        before = len(lines)
        for _ in range(round(2 * seconds)):
            clock.advance(0.5)
            demo.progress(note)
        return lines[before:]

    assert len(progress(120.0)) == 4, "120 s, and one line every 30 s"
    assert lines[0].startswith("    5 s  published       560  committed         0")
    assert lines[1].startswith("   35 s  ")
    assert lines[0].endswith("  lag 560 of telemetry  leases none yet  waiting for the table")
    assert len(progress(5.0, "waiting for the end")) == 1, "it waits for something else"
    demo.publisher.counts["orders"] += 1_000
    (line,) = progress(5.0, "waiting for the end")
    assert "  lag 1,000 of orders, 560 of telemetry  " in line
