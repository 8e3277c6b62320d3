"""Shares of a batch among shards that are behind and shards at their tip."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcl_pipeline.worker.ranges import shares

WANTED = st.lists(st.none() | st.integers(0, 1000), min_size=1, max_size=70)


@pytest.mark.parametrize(
    ("total", "wanted", "expected"),
    [
        (100, [], []),
        (100, [None, None], [50, 50]),
        (100, [None, 8, 0, 9], [77, 8, 6, 9]),
        (100, [None, None, 8, 0], [43, 43, 8, 6]),
        (100, [2, 4], [50, 50]),
        (100, [None, 80], [50, 50]),
        (3, [None] * 5, [1] * 5),
        (3, [0, None], [1, 3]),
    ],
)
def test_shards_that_are_behind_get_what_the_others_do_not_need(total, wanted, expected):
    assert shares(total, wanted) == expected


@given(st.integers(1, 500), WANTED)
def test_nobody_gets_less_than_an_even_share_or_what_it_wants(total, wanted):
    found = shares(total, wanted)
    even = total // len(wanted)
    for one, share in zip(wanted, found, strict=True):
        assert share >= max(1, even if one is None else min(one, even))
    assert sum(found) <= total + len(wanted)
