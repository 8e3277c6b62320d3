"""Pools of daemon threads: what they keep, and when their threads end."""

import threading
import time
import weakref
from collections.abc import Callable

import pytest

from kcl_pipeline.threads import DaemonPool

DEADLINE_SECONDS = 20


class Batch:
    """Something large."""


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fail(batch: Batch) -> None:
    raise ValueError(f"cannot write {type(batch).__name__}")


@pytest.mark.parametrize("call", [id, fail])
def test_an_idle_thread_keeps_nothing_of_its_last_call(call: Callable[[Batch], object]) -> None:
    pool, batch = DaemonPool(1, "kept"), Batch()
    memory = weakref.ref(batch)
    future = pool.submit(call, batch)
    wait_for(future.done)
    del batch, future
    wait_for(lambda: memory() is None)
    assert pool.submit(len, "ab").result(DEADLINE_SECONDS) == 2
    pool.shutdown()


@pytest.mark.parametrize("is_shut_down", [True, False])
def test_the_threads_end_with_the_pool(*, is_shut_down: bool) -> None:
    pool = DaemonPool(2, f"ended-{is_shut_down}")
    assert pool.map(str, [1, 2, 3]) == ["1", "2", "3"]
    threads = [one for one in threading.enumerate() if one.name.startswith("ended-")]
    assert threads
    if is_shut_down:
        pool.shutdown()
        with pytest.raises(RuntimeError, match="is shut down"):
            pool.submit(str, 4)
    else:
        del pool
    wait_for(lambda: not any(one.is_alive() for one in threads))
