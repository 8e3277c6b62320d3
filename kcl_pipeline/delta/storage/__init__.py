"""Access to the objects of a table, on a local disk or in an object store."""
