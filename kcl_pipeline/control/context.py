"""What an operation needs, and what it has done."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from kcl_pipeline.events import EventSink, ignore_events

if TYPE_CHECKING:  # the help of the command line loads this module
    from kcl_pipeline.aws import AwsClients
    from kcl_pipeline.clock import StopSignal
    from kcl_pipeline.config import ConsumerSettings
    from kcl_pipeline.control.application import ApplicationControl
    from kcl_pipeline.leases.application import ApplicationIdentity
    from kcl_pipeline.worker_status import WorkerStatus


@dataclass(frozen=True, slots=True)
class Effect:
    """What an operation has done.

    Attributes:
        result: For JSON.
        sentences: For a person.
        is_complete: False: the command and the run fail.
    """

    result: Mapping[str, Any]
    sentences: list[str]
    is_complete: bool = True


@dataclass(frozen=True)
class OperationContext:
    """What an operation needs.

    Attributes:
        open_control: Opens the tables of the application. Compact and vacuum need none.
        clients: Makes the boto3 clients for settings.
        pipeline: The pipeline. None: only the name of the application is known.
        identity: Returns the streams and the sink of the settings, for `accept`.
        stop: Ends a replay. None: nothing does.
        session_factory: Makes the Spark session of a replay.
        events: Receives what a replay reports.
        on_progress: Receives the counters of a replay.
        default_id: The id of a replay that names none. None: one is drawn.
        say: Receives sentences before the result.
    """

    open_control: Callable[[], ApplicationControl]
    clients: Callable[[ConsumerSettings], AwsClients]
    pipeline: Any = None
    identity: Callable[[], ApplicationIdentity] | None = None
    stop: StopSignal | None = None
    session_factory: Callable[[], Any] | None = None
    events: EventSink = ignore_events
    on_progress: Callable[[WorkerStatus], None] = field(default=lambda _: None)
    default_id: str | None = None
    say: Callable[[str], None] = field(default=lambda _: None)

    @cached_property
    def control(self) -> ApplicationControl:
        """The tables of the application, and who changes them."""
        return self.open_control()

    @property
    def sink(self) -> Any:
        """The sink of the pipeline. None: it is not known."""
        return getattr(self.pipeline, "sink", None)
