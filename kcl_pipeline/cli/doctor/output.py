"""Check the output table: its store, and whether a worker may write it."""

from collections.abc import Iterator
from typing import Any

from kcl_pipeline.cli.doctor.finding import ok, problem
from kcl_pipeline.delta.settings import DeltaSink
from kcl_pipeline.delta.sink import DeltaCommitter
from kcl_pipeline.errors import KclError, TableMismatchError
from kcl_pipeline.status.findings import Finding

_SUBJECT = "output table"


def check_output(sink: Any, application_name: str) -> Iterator[Finding]:
    """Check what a worker checks before it starts. A sink that is no table gives no finding.

    In an object store, this writes one small object twice, and deletes it.
    """
    if not isinstance(sink, DeltaSink):
        return
    try:
        version = DeltaCommitter(sink, application_name).check()
    except TableMismatchError as error:
        yield problem(_SUBJECT, str(error), "no worker starts until this is corrected")
    except KclError as error:
        yield problem(
            _SUBJECT,
            str(error),
            "check the address, the storage options, the credentials and the permissions of the "
            "store, see docs/iam.md",
        )
    else:
        text = "does not exist yet: the first batch creates it"
        if version is not None:
            text = f"version {version} can be written"
        yield ok(_SUBJECT, f"{sink.uri}: {text}")
