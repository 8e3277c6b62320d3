"""The guide "From kclpy": its table of keys, and its processors."""

from __future__ import annotations

import logging
import re

from kcl_pipeline.processors.properties import KEYS
from kcl_pipeline.threads import Background
from kcl_pipeline.worker.summary import StopReason
from tests.guides.snippets import ROOT, snippets
from tests.processors.log import row_of
from tests.support.worker_world import World, numbered

PAGE = "docs/from-kclpy.md"
BEGIN, END = "<!-- keys: begin -->\n", "<!-- keys: end -->"


def table():
    lines = ["| key | our setting | remark |", "|---|---|---|"]
    lines += [
        f"| `{key}` | {f'`{known.setting}`' if known.setting else '–'} | {known.reason} |"
        for key, known in KEYS.items()
    ]
    return "\n".join(lines) + "\n"


def test_the_table_has_each_key_of_the_multilangdaemon():
    text = (ROOT / PAGE).read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == table(), "write what `table()` returns"


def run(name):
    names = {}
    for one in snippets(PAGE):
        if one.language == "python":
            exec(one.code, names)
    world = World(shards=1, buffered=True, processor=names[name])
    world.put(*numbered(3))
    world.run(5)
    world.worker.shut_down(Background(world.clock), StopReason.STOPPED)
    assert row_of(world).checkpoint.sequence_number.isdigit()
    return world


def test_the_processor_of_kclpy(capsys):
    run("OrderProcessor")
    assert capsys.readouterr().out.count("shardId-000000000000 key-") == 3


def test_the_processor_of_the_java_kcl(caplog):
    caplog.set_level(logging.INFO, "sample")
    run("SampleRecordProcessor")
    messages = [record.getMessage() for record in caplog.records if record.name == "sample"]
    assert messages[0] == "Initializing @ Sequence: TRIM_HORIZON"
    assert messages[-1] == "Lost lease, so terminating."
    assert sum(bool(re.match("Processing record pk: key-", text)) for text in messages) == 3
