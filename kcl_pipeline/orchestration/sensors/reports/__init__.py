"""Report the application to Dagster: output, streams, tables and checks."""
