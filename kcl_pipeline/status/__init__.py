"""The state of an application: one snapshot of its tables, and what it shows.

`read_snapshot` reads, `findings_of` judges, and `lease_rows` and `worker_rows` are the tables. The
command line, `doctor`, the asset checks and the metadata of the fleet render these values.
"""
