"""Where the project reads and writes: AWS, the tables of the applications, the lake."""

import os

import dagster as dg

from kcl_pipeline import (
    AwsResource,
    CoordinatorStateTableResource,
    LeaseTableResource,
    WorkerMetricsTableResource,
    use_local_aws,
)

LAKE = os.environ.get("LAKE", ".run/lake")

# Without an AWS account in the environment, `dagster dev` works on an embedded AWS.
use_local_aws({"orders": 4, "telemetry": 1}, records="resources.samples:records")

aws = AwsResource()

# For assets and jobs of your own, such as a report of who holds which shard.
defs = dg.Definitions(
    resources={
        "aws": aws,
        "lease_table": LeaseTableResource(aws=aws, application_name="orders"),
        "worker_metrics_table": WorkerMetricsTableResource(aws=aws, application_name="orders"),
        "coordinator_state_table": CoordinatorStateTableResource(
            aws=aws, application_name="orders"
        ),
    }
)
