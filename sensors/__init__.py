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
# Merges small files of the table and removes files that no version uses. Switch it on in the UI.
maintenance = dg.ScheduleDefinition(
    name="orders_maintenance_every_night",
    job_name="orders_maintenance",
    cron_schedule="0 3 * * *",
    default_status=dg.DefaultScheduleStatus.STOPPED,
)
defs = dg.Definitions(sensors=[automation], schedules=[maintenance])
