"""Count the pages of records that a prefetcher holds in the memory budget of its worker."""

from __future__ import annotations

from dataclasses import dataclass

from kcl_pipeline.memory import READ_BYTES, Kind, MemoryBudget


@dataclass(slots=True, eq=False)
class Page:
    """The records of one response.

    Attributes:
        cost: Bytes of their buffers. All of them stay until the last part of the page is released.
        uses: Parts in the buffer and in batches.
        kind: As what it is counted.
    """

    cost: int
    uses: int = 1
    kind: Kind = "prefetch"


class PageMemory:
    """Count pages from their read until their batch has ended. All calls need one lock.

    Args:
        budget: Counts the pages. None: nothing is counted, and there is no limit.
    """

    def __init__(self, budget: MemoryBudget | None) -> None:
        self._budget = budget
        self._reading = self._pages = 0
        self._taken: list[Page] = []

    def limit(self, prefetch_max_bytes: int) -> int:
        """Return the most bytes that may wait."""
        share = prefetch_max_bytes if self._budget is None else self._budget.share_bytes
        return min(prefetch_max_bytes, share)

    def may_read(self) -> bool:
        """Return whether a read may begin.

        One read may always begin while no record is held and none is read. So reading never stops
        for good, whatever else uses the memory.
        """
        if self._budget is None or not (self._reading or self._pages):
            return True
        return self._budget.may_read()

    def is_full(self) -> bool:
        """Return whether no read can begin until records are released."""
        return not self._reading and not self.may_read()

    def begin_read(self) -> None:
        """Count a read under way."""
        self._reading += 1
        self._change({"prefetch": READ_BYTES})

    def end_read(self) -> None:
        """Note that a read has ended without records."""
        self._reading -= 1
        self._change({"prefetch": -READ_BYTES})

    def end_read_with(self, cost: int) -> Page:
        """Note that a read has ended, and count its page."""
        self._reading -= 1
        self._pages += 1
        self._change({"prefetch": cost - READ_BYTES})
        return Page(cost)

    def take(self, page: Page, *, is_split: bool) -> None:
        """Note that a part of a page is in a batch. If it is split, the rest still waits."""
        if self._budget is None:
            return
        if is_split:
            page.uses += 1
        elif page.kind == "prefetch":
            page.kind = "batch"
            self._change({"prefetch": -page.cost, "batch": page.cost})
        self._taken.append(page)

    def release(self, page: Page) -> None:
        """Release a part of a page."""
        page.uses -= 1
        if not page.uses:
            self._pages -= 1
            self._change({page.kind: -page.cost})

    def release_taken(self) -> None:
        """Release what was taken, because its batch has ended."""
        taken, self._taken = self._taken, []
        for page in taken:
            self.release(page)

    def _change(self, changes: dict[Kind, int]) -> None:
        if self._budget is not None:
            self._budget.change(changes)
