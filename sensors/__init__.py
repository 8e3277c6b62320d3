"""What runs by itself, beside the leader sensors, which belong to the pipelines.

A pipeline's `definitions(leader_default_running=True)` has its leader sensor, switched on.
"""

import dagster as dg

# Starts the assets that have an automation condition.
automation = dg.AutomationConditionSensorDefinition(
    "automation",
    target=dg.AssetSelection.all(),
    default_status=dg.DefaultSensorStatus.RUNNING,
)


def every_night(operation: str, hour: int) -> dg.ScheduleDefinition:
    """Change the table every night, as `kcl-pipeline do` does. Switch it on in the UI."""
    return dg.ScheduleDefinition(
        name=f"orders_{operation}_every_night",
        job_name="orders_operate",
        cron_schedule=f"0 {hour} * * *",
        run_config={"ops": {"orders_operation": {"config": {"operation": {operation: {}}}}}},
        default_status=dg.DefaultScheduleStatus.STOPPED,
    )


# Merges small files of the table, and removes files that no version uses.
maintenance = [every_night("compact", 3), every_night("vacuum", 4)]
defs = dg.Definitions(sensors=[automation], schedules=maintenance)
