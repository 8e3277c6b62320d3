"""The error of a checkpoint, as `amazon_kclpy.checkpoint_error` has it."""

from kcl_pipeline.processors.checkpointer import CheckpointError

__all__ = ["CheckpointError"]
