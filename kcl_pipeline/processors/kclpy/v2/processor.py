"""The base class of a processor, as `amazon_kclpy.v2.processor` has it."""

from kcl_pipeline.processors.kclpy.versions import SecondVersion as RecordProcessorBase

__all__ = ["RecordProcessorBase"]
