"""The module and class names of kclpy (`amazon_kclpy`), so that its applications run here.

In an application, `amazon_kclpy` becomes `kcl_pipeline.processors.kclpy`, and nothing else changes.
As in kclpy, an error of a method is printed, and the next records are delivered.
"""
