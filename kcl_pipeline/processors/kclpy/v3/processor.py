"""The base class of a processor, as `amazon_kclpy.v3.processor` has it."""

from kcl_pipeline.processors.kclpy.versions import ThirdVersion as RecordProcessorBase

__all__ = ["RecordProcessorBase"]
