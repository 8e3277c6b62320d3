"""A GetRecords body parsed by byte offsets, and the same body read by a parser."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import pytest

from kcl_pipeline.errors import UnavailableError
from kcl_pipeline.kinesis import decode
from kcl_pipeline.kinesis.client import RecordsPage
from kcl_pipeline.kinesis.decode import decode_page

ByOffsets = Literal["columns_of", "cbor_columns_of"]
"""The function of `decode` that parses by byte offsets."""


def by_parser(body: bytes, content_type: str, by_offsets: ByOffsets) -> RecordsPage:
    """The page as a parser reads it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, by_offsets, lambda _: None)
        return decode_page(body, content_type, "orders", "shard-0")


def assert_read_alike(body: bytes, content_type: str, by_offsets: ByOffsets) -> None:
    """Read without a parser, and as the parser does."""
    assert getattr(decode, by_offsets)(body) is not None
    page, expected = (
        decode_page(body, content_type, "orders", "shard-0"),
        by_parser(body, content_type, by_offsets),
    )
    page.records.validate(full=True)
    assert page.records.equals(expected.records)
    assert (page.next_iterator, page.millis_behind_latest, page.child_shards, page.bytes) == (
        expected.next_iterator,
        expected.millis_behind_latest,
        expected.child_shards,
        expected.bytes,
    )


def changed_bodies_read_alike(
    sound: bytes, marks: Sequence[bytes], changes: int, content_type: str, by_offsets: ByOffsets
) -> int:
    """Change bytes of a body anywhere, most often into `marks`: what is parsed by byte offsets is
    as the parser reads it. How many were parsed by byte offsets.
    """
    rng = random.Random(7)
    read = 0
    for _ in range(changes):
        body = bytearray(sound)
        for _ in range(rng.choice((1, 1, 2))):
            at = rng.randrange(len(body))
            body[at : at + rng.choice((0, 1, 1, 2))] = rng.choice(
                (*marks, bytes([rng.randrange(256)]))
            )
        if getattr(decode, by_offsets)(bytes(body)) is None:
            continue
        try:
            page = decode_page(bytes(body), content_type, "orders", "shard-0")
        except UnavailableError:
            continue
        assert page.records.equals(by_parser(bytes(body), content_type, by_offsets).records), bytes(
            body
        )
        read += 1
    return read
