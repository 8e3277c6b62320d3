"""Read rows of a Delta table with a query.

`DeltaTable.to_pyarrow_table` reads through a file system written in Python, on threads of pyarrow.
A process that ends while such a thread runs is aborted ("terminate called without an active
exception", exit code 134). Queries of delta-rs use threads of its own, which do not call Python.
"""

from __future__ import annotations

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder


def read_rows(table: DeltaTable, query: str) -> pa.Table:
    """Return the result of a query.

    Args:
        table: The table, at the version that is read. The query knows it as `rows`.
        query: A query in the SQL of DataFusion. Without `order by`, rows come in any order.
    """
    return pa.table(QueryBuilder().register("rows", table).execute(query).read_all())
