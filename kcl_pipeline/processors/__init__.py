"""Record processors: the interface of the KCL, without a JVM and without a process per shard.

`processor` has the interface, `checkpointer` writes checkpoints, `calls` makes the calls. The
package `kclpy` has the module and class names of kclpy, and `properties` reads the properties file
of its MultiLangDaemon.
"""

from kcl_pipeline.processors.calls import ProcessorCalls, ProcessorSink
from kcl_pipeline.processors.checkpointer import (
    Checkpointer,
    CheckpointError,
    PreparedCheckpoint,
)
from kcl_pipeline.processors.processor import (
    InitializeInput,
    LeaseLostInput,
    ProcessRecordsInput,
    RecordProcessor,
    ShardEndedInput,
    ShutdownRequestedInput,
)
from kcl_pipeline.processors.records import Record

__all__ = [
    "CheckpointError",
    "Checkpointer",
    "InitializeInput",
    "LeaseLostInput",
    "PreparedCheckpoint",
    "ProcessRecordsInput",
    "ProcessorCalls",
    "ProcessorSink",
    "Record",
    "RecordProcessor",
    "ShardEndedInput",
    "ShutdownRequestedInput",
]
