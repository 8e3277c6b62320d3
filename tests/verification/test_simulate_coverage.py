"""`make simulate-coverage`: what no seed reaches needs a reason, and each reason must be needed."""

import importlib
import sys
import textwrap
from pathlib import Path

import pytest

from verification import simulate_coverage as tool
from verification.probes import Probes, instrumented
from verification.simulate_coverage import Reason

ROOT = Path(__file__).parents[2]

SOURCE = '''
"""A module."""

TOP = 1


def once(number):
    """Do it."""
    global TOP
    if number > 2:
        TOP = number
    for one in range(number):
        if one == 7:
            return "seven"
    return "none"


class Thing:
    size: int = 3

    def used(self, word):
        match word:
            case "a":
                return 1
            case "b":
                return 2
        try:
            return int(word)
        except ValueError:
            return 0
        finally:
            self.size += 1

    def unused(self):
        while True:
            return [one for one in range(self.size)]
'''


@pytest.fixture
def product(tmp_path, monkeypatch):
    """A package `probed` with a probed module `worker.thing` and one that is not probed."""
    for package in ("probed", "probed/worker", "probed/other"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    (tmp_path / "probed/worker/thing.py").write_text(SOURCE)
    (tmp_path / "probed/other/thing.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "probed"
    forget()


def forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "probed"]:
        del sys.modules[name]


def left(product, *calls):
    """What is not reached when these functions of the module are called with probes in it."""
    forget()
    probes = Probes(product, ["worker"])
    with probes.active():
        module = importlib.import_module("probed.worker.thing")
        other = importlib.import_module("probed.other.thing")
    other.once(9)
    for call in calls:
        call(module)
    texts = tool.sources(product, ["worker"])
    reached = {file: bytes(store) for file, store in probes.stores.items()}
    assert set(reached) <= set(texts)
    return texts, tool.unreached(texts, reached)


def shown(found):
    return [(one.function, one.what) for one in found]


def test_functions_that_are_not_called_are_found(product):
    _, found = left(product)
    assert shown(found) == [
        ("Thing.unused", "(not called)"),
        ("Thing.used", "(not called)"),
        ("once", "(not called)"),
    ]


def test_statements_and_branches_of_functions_that_are_called_are_found(product):
    _, found = left(product, lambda module: module.once(3), lambda module: module.Thing().used("x"))
    assert shown(found) == [
        ("Thing.unused", "(not called)"),
        ("Thing.used", "return 1"),
        ("Thing.used", "return 2"),
        ("once", "if number > 2: -> otherwise"),
        ("once", 'return "seven"'),
    ]


def test_nothing_is_found_when_everything_was_reached(product):
    calls = [lambda module, n=n: module.once(n) for n in (1, 9)]
    calls += [lambda module, w=w: module.Thing().used(w) for w in ("a", "b", "x")]
    _, found = left(product, *calls, lambda module: module.Thing().unused())
    assert shown(found) == []


def test_a_loop_that_is_always_left_early_never_comes_to_its_end(product):
    _, found = left(product, lambda module: module.once(9))
    assert ("once", "for one in range(number): -> otherwise") in shown(found)


def test_probed_code_does_what_it_did(product):
    probes = Probes(product, ["worker"])
    with probes.active():
        module = importlib.import_module("probed.worker.thing")
    assert [module.once(number) for number in (1, 3, 9)] == ["none", "none", "seven"]
    assert [module.Thing().used(word) for word in ("a", "b", "x")] == [1, 2, 0]
    assert module.Thing().unused() == [0, 1, 2]


def test_all_modules_of_the_product_can_be_probed():
    texts = tool.sources(tool._PRODUCT, tool.PACKAGES)
    assert len(texts) > 50
    for file, text in texts.items():
        tree, places = instrumented(text)
        compile(tree, file, "exec")
        assert all(one.begin is None or one.begin < number for number, one in enumerate(places))


def verdict(product, given, capsys):
    texts, found = left(product, lambda module: module.once(3))
    failures = tool.report(found, tool.all_code(texts), given)
    return failures, capsys.readouterr().out.splitlines()[:-1]


THING = Reason(("worker:Thing.*",), (), "nobody uses it")
ONCE = Reason(("worker/thing:once",), ("if number *", 'return "seven"'), "it is three")


def test_an_unreached_line_without_a_reason_fails(product, capsys):
    assert verdict(product, [THING, ONCE], capsys) == (0, [])
    failures, lines = verdict(product, [THING], capsys)
    assert failures == 2
    assert lines == [
        "worker/thing.py:10 once: if number > 2: -> otherwise",
        'worker/thing.py:14 once: return "seven"',
    ]


@pytest.mark.parametrize(
    ("useless", "named"),
    [
        (Reason(("worker:Nothing.*",), (), "r"), "worker:Nothing.*"),
        (Reason(("worker:Thing.*", "leader:Thing.*"), (), "r"), "leader:Thing.*"),
        (Reason(("work:Thing.*",), (), "r"), "work:Thing.*"),
        (Reason(("worker:once",), ('return "seven"', "gone"), "r"), "worker:once: gone"),
        (Reason(("worker:once",), ('return "none"',), "reached"), 'worker:once: return "none"'),
        (Reason(("worker:once",), ("gone",), "r", is_rare=True), "worker:once: gone"),
    ],
)
def test_a_reason_that_explains_nothing_fails(product, capsys, useless, named):
    failures, lines = verdict(product, [THING, ONCE, useless], capsys)
    assert failures == len(lines) > 0
    assert f"this entry of unreached.toml explains nothing: {named}. Remove it, or correct it." in (
        lines
    )


def test_what_some_seeds_may_reach_need_not_be_missing(product, capsys):
    rare = Reason(("worker:once",), ('return "none"',), "few seeds do", is_rare=True)
    assert verdict(product, [THING, ONCE, rare], capsys) == (0, [])


def test_the_reasons_are_read_from_the_file(tmp_path):
    path = tmp_path / "unreached.toml"
    path.write_text(
        textwrap.dedent("""
        [[unreached]]
        functions = ["worker:Thing.*"]
        reason = "nobody uses it"

        [[unreached]]
        functions = ["worker:once"]
        texts = ["return *"]
        reason = "few seeds do"
        is_rare = true
        """)
    )
    assert tool.reasons(path) == [
        THING,
        Reason(("worker:once",), ("return *",), "few seeds do", is_rare=True),
    ]


def test_every_reason_of_the_repository_names_code_that_exists():
    """That each is needed, and that none is missing, is what `make simulate-coverage` finds."""
    texts = tool.sources(tool._PRODUCT, tool.PACKAGES)
    known = tool.all_code(texts)
    given = tool.reasons()
    assert [text for one in given for text in one.useless(known, known)] == []
    assert all(len(one.reason) > 20 for one in given)


@pytest.mark.long
def test_processes_combine_what_their_seeds_reach(monkeypatch):
    monkeypatch.setattr(tool, "_CHUNK", 1)
    reached = tool.run(range(4, 6), 1, 2)
    texts = tool.sources(tool._PRODUCT, tool.PACKAGES)
    found = tool.unreached(texts, reached)
    functions = {one.function for one in found if one.what == "(not called)"}
    assert "DynamoDbStore.get" in functions
    assert not {"Worker.run", "LeaderCycle.run_once", "HeldLeases.renew_all"} & functions


def test_the_tests_that_reasons_name_exist():
    words = " ".join(one.reason for one in tool.reasons()).replace("(", " ").split()
    named = [word.strip(".,;:)") for word in words if word.startswith("tests/")]
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []
