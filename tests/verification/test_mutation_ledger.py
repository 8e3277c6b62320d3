"""The ledger fits the tree and the README; that each change is noticed is `make mutate`."""

from verification import mutations


def test_every_entry_fits_one_place_of_the_tree():
    assert [problem for m in mutations.ledger() if (problem := mutations.stale(m))] == []


def test_there_are_at_least_forty_with_names_of_their_own():
    names = [m.name for m in mutations.ledger()]
    assert len(names) == len(set(names)) >= 40


def test_the_guards_are_there():
    guards = {
        name
        for m in mutations.ledger()
        if not m.guard.startswith(mutations.SEEDS)
        for name in m.guard.split()
    }
    assert guards
    assert [name for name in guards if not (mutations.ROOT / name.split("::")[0]).is_file()] == []
