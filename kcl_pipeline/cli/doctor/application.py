"""Check the recorded streams and sink of the application."""

from collections.abc import Sequence

from kcl_pipeline.cli.doctor.finding import ok, problem
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import OtherApplicationError, UnreadableRowError
from kcl_pipeline.leases.application.identity import ApplicationIdentity, successor
from kcl_pipeline.leases.tables import CoordinatorStateTable
from kcl_pipeline.shards import StreamId
from kcl_pipeline.status.findings import Finding


def check_application(
    table: CoordinatorStateTable, settings: ConsumerSettings, streams: Sequence[StreamId]
) -> Finding:
    """Check that the recorded streams are those of the settings."""
    subject = "application"
    try:
        record = table.read_application()
        if record is None:
            return ok(subject, "its streams are not recorded yet; the first start records them")
        if len(streams) == len(settings.streams):
            configured = ApplicationIdentity.of(streams, is_multi_stream=settings.is_multi_stream)
            successor(settings.application_name, record.identity, configured)
    except (OtherApplicationError, UnreadableRowError) as error:
        return problem(subject, str(error), "show the record with `kcl-pipeline do accept`")
    names = ", ".join(stream.name for stream in record.identity.streams)
    return ok(subject, f"reads {names}, writes to {record.identity.sink or 'no recorded sink'}")
