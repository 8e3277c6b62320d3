"""Read the snippets of a page, and run its commands."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from typer.testing import CliRunner

from kcl_pipeline.cli import app

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```([\w{}-]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"Save (it|this) as\s+`(\w+\.py)`")
RUN_LANGUAGES = ("python", "shell")
NEEDS_A_JAR = "# needs the jar of Delta Lake"
SECONDS = 120
TUTORIAL = "docs/tutorial.md"


@dataclass(frozen=True)
class Snippet:
    """A block of code of a page. `file`: the page says to save it under this name."""

    language: str
    code: str
    line: int
    file: str | None = None


def pages() -> list[str]:
    """The pages whose snippets run in `test_snippets`.

    The tutorial and those of docs/contributing and docs/deployment have tests of their own.
    """
    found = {ROOT / "README.md", *(ROOT / "docs").glob("*.md")} - {ROOT / TUTORIAL}
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def snippets(page: str) -> list[Snippet]:
    """The snippets of a page, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = list(FENCE.finditer(text))
    names: dict[int, str] = {}
    for saved in SAVED.finditer(text):
        numbers = [n for n, block in enumerate(blocks) if block[1] == "python"]
        before = [n for n in numbers if blocks[n].end() <= saved.start()]
        after = [n for n in numbers if blocks[n].start() >= saved.end()]
        names[before[-1] if saved[1] == "it" else after[0]] = saved[2]
    return [
        Snippet(
            "shell" if block[1] == "bash" else block[1],
            block[2],
            text.count("\n", 0, block.start()) + 2,
            names.get(number),
        )
        for number, block in enumerate(blocks)
    ]


def missing_packages(code: str) -> list[str]:
    """The packages that a snippet imports and that are not installed."""
    tree = ast.parse(code)
    named = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    missing = sorted(name for name in named if not _is_installed(name))
    return [*missing, "a jar"] if NEEDS_A_JAR in code else missing


def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def run_python(code: str, source: str, names: dict[str, object]) -> None:
    """Run a snippet, then its test functions."""
    before = set(names)
    # Dagster reads annotations, and this module has annotations that are strings
    exec(compile(code, source, "exec", dont_inherit=True), names)
    for name in sorted(set(names) - before):
        if name.startswith("test_"):
            names[name]()


def commands(code: str) -> Iterator[list[str]]:
    """The commands of a shell snippet, without comments."""
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def run_command(words: list[str], folder: Path) -> None:
    """Run a command of a page, or check it if it needs the network or does not end."""
    if words[0] == "export":
        name, _, value = words[1].partition("=")
        assert value, words
        os.environ.setdefault(name, value)  # the address of the embedded AWS of the test stays
    elif words[:2] == ["kcl-pipeline", "local"]:
        _start_local([*words[1:], "--port", "0"], folder)
    elif words[:2] == ["kcl-pipeline", "--install-completion"]:  # changes files of the user
        assert CliRunner().invoke(app, ["--help"]).exit_code == 0
    elif words[0] == "kcl-pipeline":
        done = CliRunner().invoke(app, words[1:])
        assert done.exit_code == 0, f"{words}: {done.output}\n{done.exception!r}"
    elif words[:2] == ["python", "-m"]:
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, *words[1:]]
        subprocess.run(command, cwd=folder, env=environment, check=True, timeout=SECONDS)
    elif words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    elif words[:2] == ["pip", "install"]:
        check_requirement(words[2])
    else:
        subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=SECONDS)


def _start_local(words: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", "kcl_pipeline.cli", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("http://127.0.0.1:")
        finally:
            process.terminate()


def check_requirement(text: str) -> None:
    """Check that a requirement of a page names this package and extras that it has."""
    requirement = Requirement(text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirement.name == project["name"]
    declared = set(project["optional-dependencies"])
    assert requirement.extras <= declared, text
