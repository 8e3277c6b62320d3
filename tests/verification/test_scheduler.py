"""The virtual-time scheduler: order by time, one seed one history, crash, pause, locks."""

from verification.simulation.environment.scheduler import (
    Host,
    HostCrashed,
    Scheduler,
    SimulatedClock,
)


def history(seed: int) -> list[str]:
    scheduler = Scheduler(seed)
    seen: list[str] = []
    for name in ("a", "b", "c"):
        host = Host(name, scheduler)
        clock = SimulatedClock(host)

        def body(name: str = name, clock: SimulatedClock = clock) -> None:
            for step in range(4):
                seen.append(f"{name}{step}@{clock.monotonic():.1f}")
                clock.sleep(1.0)

        host.spawn("t", body)
    scheduler.run()
    return seen


def test_time_orders_steps_and_the_seed_orders_ties():
    one = history(1)
    assert one == history(1)
    assert any(history(seed) != one for seed in range(2, 6))
    assert [line.split("@")[1] for line in one] == sorted(line.split("@")[1] for line in one)


def test_a_crashed_host_runs_no_more_and_its_effects_are_refused():
    scheduler = Scheduler(0)
    host = Host("h", scheduler)
    clock = SimulatedClock(host)
    effects: list[str] = []

    def body() -> None:
        try:
            while True:
                clock.sleep(1.0)
                effects.append("tick")
        finally:
            try:
                clock.sleep(0.1)
            except HostCrashed:
                effects.append("refused")
                raise

    task = host.spawn("t", body)
    scheduler.run(seconds=3.5)
    host.crash()
    scheduler.run(seconds=10)
    assert effects == ["tick"] * 3 + ["refused"]
    assert task.done
    assert task.error is None


def test_a_paused_host_stands_still_and_goes_on_later():
    scheduler = Scheduler(0)
    host = Host("h", scheduler)
    clock = SimulatedClock(host)
    times: list[float] = []

    def body() -> None:
        for _ in range(3):
            clock.sleep(1.0)
            times.append(clock.monotonic())

    host.spawn("t", body)
    scheduler.run(until=lambda: len(times) == 1)
    host.pause(20.0)
    scheduler.run()
    assert times == [1.0, 21.0, 22.0]


def test_a_lock_held_across_a_wait_keeps_others_out():
    scheduler = Scheduler(3)
    host = Host("h", scheduler)
    clock = SimulatedClock(host)
    lock = clock.lock()
    inside: list[int] = []
    most: list[int] = []

    def body() -> None:
        with lock:
            inside.append(1)
            most.append(len(inside))
            clock.sleep(0.5)
            inside.pop()

    for _ in range(4):
        host.spawn("t", body)
    scheduler.run()
    assert most == [1, 1, 1, 1]
    assert not inside


def test_the_error_of_a_task_is_kept_and_signals_wake_waiters():
    scheduler = Scheduler(5)
    host = Host("h", scheduler)
    clock = SimulatedClock(host)
    signal = clock.signal()
    woke: list[float] = []

    def waiter() -> None:
        assert signal.wait(10.0)
        woke.append(clock.monotonic())

    def setter() -> None:
        clock.sleep(2.0)
        signal.set()
        raise ValueError("told")

    host.spawn("w", waiter)
    failing = host.spawn("s", setter)
    scheduler.run()
    assert 2.0 <= woke[0] <= 2.5
    assert isinstance(failing.error, ValueError)
