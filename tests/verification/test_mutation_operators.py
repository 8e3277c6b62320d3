"""Each operator of the mutation ledger makes one change; what fits no place is an error."""

import ast

import pytest

from verification import java_operators
from verification.mutation_operators import NoSuchPlaceError, change

SOURCE = '''
LIMIT = 3


class Writer:
    """Writes."""

    def write(self, row, began):
        """With a comment that goes."""
        if row is None or row.ended:  # why
            return False
        with self._lock:
            self._table.put(row, [Absent("key"), Equals("counter", row.counter)], wait=True)
        now = self._clock.monotonic()
        self.renewed_at = began
        try:
            left = min(row.left, self._most) - 1
        except ValueError as error:
            raise RowError("x") from error
        for one in row.children:
            if one not in self._seen:
                continue
            self._seen.add(one)
        self._sent = [one for one in row.children if one.open]
        return 0 < left <= LIMIT
'''


def changed(at, operator, name="Writer.write"):
    """The lines that a change removes and adds, without their indentation."""
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    after = change(SOURCE, name, at, operator).splitlines()
    removed = [line.strip() for line in before if line not in after]
    return removed, [line.strip() for line in after if line not in before]


@pytest.mark.parametrize(
    ("at", "operator", "expected"),
    [
        ("if ended", "becomes False", "if False:"),
        ("if ended", "negated", "if not (row is None or row.ended):"),
        ("if ended", "ignored", "if (row is None or row.ended) and False:"),
        ("operand ended", "removed", "if row is None:"),
        ("if ended", "becomes operand 2", "if row.ended:"),
        (
            "call Absent",
            "removed",
            "self._table.put(row, [Equals('counter', row.counter)], wait=True)",
        ),
        (
            "call Absent + keyword wait",
            "removed + becomes False",
            "self._table.put(row, [Equals('counter', row.counter)], wait=False)",
        ),
        (
            "list Absent",
            "becomes []",
            "self._table.put(row, [], wait=True)",
        ),
        (
            "call Absent",
            "moved last",
            "self._table.put(row, [Equals('counter', row.counter), Absent('key')], wait=True)",
        ),
        ("assign renewed_at", "repeats now", "self.renewed_at = self._clock.monotonic()"),
        ("assign renewed_at", "becomes now", "self.renewed_at = now"),
        ("call min", "becomes argument 2", "left = self._most - 1"),
        ("call min", "calls max", "left = max(row.left, self._most) - 1"),
        ("assign left", "becomes operand 1", "left = min(row.left, self._most)"),
        ("name _most", "plus 1", "left = min(row.left, self._most + 1) - 1"),
        ("except ValueError", "becomes KeyError", "except KeyError as error:"),
        ("for children", "becomes ()", "for one in ():"),
        ("filter open", "removed", "self._sent = [one for one in row.children]"),
        ("if _seen", "compares with in", "if one in self._seen:"),
        ("return 0 / operand LIMIT", "removed", "return 0 < left"),
        ("return False", "becomes ()", "return ()"),
        ("with _lock", "removed", "if True:"),
    ],
)
def test_an_operator_changes_one_place(at, operator, expected):
    assert changed(at, operator)[1] == [expected]


def test_a_statement_is_left_out_moved_or_replaced():
    assert changed("call add", "removed") == (["self._seen.add(one)"], ["None"])
    assert changed("assign renewed_at", "removed") == (["self.renewed_at = began"], ["pass"])
    assert changed("raise", "becomes continue")[1] == ["continue"]
    moved = change(SOURCE, "Writer.write", "assign renewed_at", "moved last").splitlines()
    assert moved[-1].strip() == "self.renewed_at = began"


def test_a_constant_of_a_module_is_changed_by_its_name():
    assert changed("constant 3", "becomes 4", "LIMIT") == (["LIMIT = 3"], ["LIMIT = 4"])


@pytest.mark.parametrize(
    ("name", "at", "operator", "message"),
    [
        ("Writer.read", "if ended", "removed", "there is no Writer.read"),
        ("Writer.write", "if begun", "removed", "'if begun' fits 0 places"),
        ("Writer.write", "if", "removed", "'if' fits 2 places"),
        ("Writer.write", "if #3", "removed", "'if #3' fits 2 places"),
        ("Writer.write", "if ended", "doubled", "doubled is not an operator"),
        ("Writer.write", "if ended", "becomes a.b[0]", "neither a literal nor a name"),
        ("Writer.write", "call min", "becomes argument 3", "there are 2 of argument"),
        ("Writer.write", "return False", "becomes False", "changes nothing"),
        ("Writer.write", "except", "becomes continue", "needs a statement"),
    ],
)
def test_an_entry_that_does_not_fit_is_refused(name, at, operator, message):
    with pytest.raises(NoSuchPlaceError, match=message):
        change(SOURCE, name, at, operator)


JAVA = """
final class Outer {
  static int left(String name, int most) throws IOException {
    if (name == null || most + 1 < limit) { // most
      return most;
    }
    run(name, "a, b", new Job(most));
    return 0;
  }
}
"""


@pytest.mark.parametrize(
    ("at", "operator", "expected"),
    [
        ("if name", "becomes false", "    if (false) { // most"),
        ("if name / operand limit", "removed", "    if (name == null || false) { // most"),
        ("return most", "becomes 0", "      return 0;"),
        ("call run", "becomes argument 3 applied", "    new Job(most).apply();"),
        ("call run", "removed", "    ;"),
    ],
)
def test_java_is_changed_by_its_brackets(at, operator, expected):
    after = java_operators.change(JAVA, "Outer.left", at, operator).splitlines()
    assert [line for line in after if line not in JAVA.splitlines()] == [expected]
    with pytest.raises(NoSuchPlaceError):
        java_operators.change(JAVA, "Outer.right", at, operator)
