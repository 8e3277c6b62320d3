"""async-kinesis consumer with a processor that does not decode the data.

It runs in its own virtual environment: `python async_kinesis_loop.py STREAM ENDPOINT`.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from kinesis import Consumer
from kinesis.aggregators import SimpleAggregator
from kinesis.processors import BatchRunner


class Raw:
    """Serializer that returns its input."""

    def serialize(self, item: Any) -> Any:
        """Return the item unchanged."""
        return item

    def deserialize(self, data: Any) -> Any:
        """Return the data unchanged."""
        return data


class RawProcessor(BatchRunner, SimpleAggregator, Raw):
    """Processor in which one record is one item of bytes."""


async def main(stream: str, endpoint: str) -> None:
    taken = 0
    async with Consumer(
        stream_name=stream,
        endpoint_url=endpoint,
        region_name="us-east-1",
        processor=RawProcessor(),
        shard_fetch_rate=5,
        idle_timeout=60.0,
    ) as consumer:
        async for _ in consumer:
            taken += 1
            if taken % 2000 == 0:
                print(taken, flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
