"""Tests of the status of an application."""
