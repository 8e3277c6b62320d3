"""A table that follows the orders: it is computed again when orders have arrived."""

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
    """Number and sum of the orders of each minute."""
    orders = DeltaTable(f"{LAKE}/orders").to_pyarrow_table(columns=["time", "amount"])
    minutes = orders.append_column("minute", pc.floor_temporal(orders["time"], unit="minute"))
    revenue: pa.Table = minutes.group_by("minute").aggregate(
        [("amount", "count"), ("amount", "sum")]
    )
    write_deltalake(f"{LAKE}/revenue_per_minute", revenue, mode="overwrite")
    return dg.MaterializeResult(
        metadata={"dagster/row_count": revenue.num_rows, "orders": orders.num_rows}
    )
