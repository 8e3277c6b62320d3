"""A table that follows `orders/orders`: it is computed again when rows have arrived."""

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from resources import LAKE


@dg.asset(
    key=["orders", "revenue_per_minute"],
    deps=[["orders", "orders"]],
    group_name="orders",
    kinds={"deltalake"},
    automation_condition=dg.AutomationCondition.eager(),
)
def revenue_per_minute() -> dg.MaterializeResult[None]:
    """Number and sum of what was ordered in each minute."""
    rows = DeltaTable(f"{LAKE}/orders").to_pyarrow_table(columns=["time", "amount"])
    minutes = rows.append_column("minute", pc.floor_temporal(rows["time"], unit="minute"))
    revenue: pa.Table = minutes.group_by("minute").aggregate(
        [("amount", "count"), ("amount", "sum")]
    )
    write_deltalake(f"{LAKE}/revenue_per_minute", revenue, mode="overwrite")
    return dg.MaterializeResult(
        metadata={"dagster/row_count": revenue.num_rows, "rows_read": rows.num_rows}
    )
