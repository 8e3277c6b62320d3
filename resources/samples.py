"""Sample records, which the embedded AWS puts into the streams."""

import os
import random
import time
from datetime import UTC, datetime
from typing import Any

ORDERS_PER_SECOND = 100


def records(second: int) -> dict[str, list[Any]]:
    """Return what is put in one second: what is ordered, and the load of this host.

    One order of a thousand is not JSON: it becomes a dead letter. No id is used twice, also after
    a restart, so that the table shows whether a record is missing or repeated.
    """
    epoch_seconds = int(time.time())
    now = datetime.fromtimestamp(epoch_seconds, UTC).isoformat()
    first = epoch_seconds * ORDERS_PER_SECOND
    ordered: list[Any] = [
        {
            "id": f"order-{number}",
            "user": f"user-{random.randrange(1_000):04d}",
            "amount": round(random.lognormvariate(3, 1), 2),
            "time": now,
        }
        for number in range(first, first + ORDERS_PER_SECOND)
    ]
    if second % 10 == 0:
        ordered[-1] = b"this is not JSON"
    reading = {"id": f"load_1m-{epoch_seconds}", "metric": "load_1m", "value": os.getloadavg()[0]}
    return {"orders": ordered, "telemetry": [reading | {"time": now}]}
