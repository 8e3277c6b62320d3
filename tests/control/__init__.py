"""Tests of kcl_pipeline.control."""
