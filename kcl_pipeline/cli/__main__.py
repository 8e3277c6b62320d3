"""Run the command line by `python -m kcl_pipeline.cli`."""

from kcl_pipeline.cli import app

app()
