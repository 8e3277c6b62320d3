"""Parse the number of a prepared batch in a lease row."""

from __future__ import annotations

import re
from typing import Final

from kcl_pipeline.leases.attributes import MAX_LONG
from kcl_pipeline.leases.lease.values import Lease

INCARNATION_BITS: Final = 26
COUNTER_BITS: Final = 32
"""Both fields have at most 18 decimal digits together. Every version of this package reads them."""

_BATCH_NUMBER: Final = re.compile(rb"[1-9][0-9]{0,18}")


def pending_number(lease: Lease) -> int | None:
    """Return the number of the prepared batch in `pendingCheckpointState`.

    The number is ASCII decimal. Text after a slash is ignored.

    Returns:
        The number. None: no batch is prepared, or another program wrote the state.
    """
    text = (lease.pending_checkpoint_state or b"").partition(b"/")[0]
    if lease.pending_checkpoint is None or not _BATCH_NUMBER.fullmatch(text):
        return None
    number = int(text)
    return number if number <= MAX_LONG else None
