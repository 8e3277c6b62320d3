"""Cases of which `make test` runs some and `make test-long` the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def shortened(cases: Iterable[Any], short: Callable[[Any], bool]) -> list[ParameterSet]:
    """Mark the cases that are not in the short form.

    Args:
        cases: Values for `pytest.mark.parametrize`; a tuple has one value for each argument.
        short: Whether `make test` runs a case.
    """
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if short(case) else (pytest.mark.long,),
        )
        for case in cases
    ]
