"""The 2,000 fixed seeds keep every invariant, and no fault is left untried: `make test-long`.

They run in parts, so that a run that was stopped continues after the last whole part.
"""

import json

import pytest

from verification import simulate as command
from verification.simulation.seeds import FIXED, shown

PART = 1_000
PARTS = [FIXED[first : first + PART] for first in range(0, len(FIXED), PART)]


@pytest.mark.long
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("seeds", PARTS, ids=shown)
def test_the_fixed_seeds_keep_every_invariant(seeds, capsys):
    code = command.main(["--seeds", shown(seeds), "--json"])
    captured = capsys.readouterr()
    answer = json.loads(captured.out.splitlines()[-1])
    found = (code, answer["seeds"], answer["violations"], answer["empty_cells"])
    assert found == (0, PART, 0, 0), captured.err
