"""Records with several JSON objects, in the transforms that the documents show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kcl_pipeline import DeltaSink, KinesisPipeline
from kcl_pipeline.testing import run_transform
from tests.guides.snippets import ROOT, snippets

TEMPLATE = "kcl_pipeline/cli/templates/assets_telemetry.py.txt"
PAGES = ["README.md", "docs/transforms.md", TEMPLATE]
ROW = {"user": "ann", "page": "/", "amount": 1.5, "seconds": 1.5, "time": "2026-01-02T03:04:05Z"}
ROW |= {"metric": "cpu", "value": 1.5}


def code_of(page: str) -> str:
    if page == TEMPLATE:
        text = Path(ROOT, page).read_text()
        code = text[text.index("# `_raw` receives") :]
    else:
        code = "\n".join(
            one.code
            for one in snippets(page)
            if "def parse(" in one.code or "def parse_lines(" in one.code
        )
    # Only the function: the pipelines of the pages need their streams.
    for name in ("orders", "telemetry"):
        code = code.split(f"\n\n\n{name} = ")[0]
    return code


def functions(page: str) -> dict:
    names: dict = {}
    exec(
        "from pyspark.sql import DataFrame\nfrom pyspark.sql import functions as f\n"
        + code_of(page).replace("from __future__ import annotations\n", ""),
        names,
    )
    return names


def pipeline(transform) -> KinesisPipeline:
    return KinesisPipeline(
        name="several", streams=["s"], transform=transform, sink=DeltaSink("unused")
    )


def one(name: str) -> str:
    return json.dumps({"id": name, **ROW})


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("page", PAGES)
def test_the_first_object_is_never_taken_alone(page: str):
    several = [
        one("a") + one("b"),
        f"{one('a')}\n{one('b')}",
        f"{one('a')},{one('b')}",
        f"[{one('a')}, {one('b')}]",
        f"{one('a')}]{one('b')}",
        f"{one('a')} and so on",
    ]
    found = run_transform(
        pipeline(functions(page)["parse"]), [one("}{"), f"{one('x')}\n", *several]
    )
    assert [row["id"] for row in found.rows] == ["}{", "x"]
    assert len(found.errors) == len(several)


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_the_function_for_lines_gives_a_row_for_each_object():
    payloads = [
        one("a"),
        f"{one('b')}\n{one('c')}\r\n{one('d')}\n",
        f"{one('e')}{one('f')}\n{one('g')}",
    ]
    found = run_transform(pipeline(functions("docs/transforms.md")["parse_lines"]), payloads)
    assert sorted(row["id"] for row in found.rows) == ["a", "b", "c", "d", "g"]
    assert len(found.errors) == 1
