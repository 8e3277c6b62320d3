"""Wrong options: each is refused with the option, its value, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kcl_pipeline import CheckLimits, DeltaSink, Fleet, KinesisPipeline, SettingsError

SINK = DeltaSink("lake/orders")


def pipeline(**differs: Any) -> KinesisPipeline:
    return KinesisPipeline(**{"name": "orders", "streams": ["orders"], "sink": SINK} | differs)


WRONG: list[tuple[Callable[[], object], str]] = [
    (
        lambda: pipeline(name=3),
        "name=3 is not a string. Write the name of the application, such as 'orders'.",
    ),
    (
        lambda: pipeline(streams="orders"),
        "streams='orders' is a string. Write streams=['orders'].",
    ),
    (
        lambda: pipeline(sink="lake/orders"),
        "sink='lake/orders' is a string. Write sink=DeltaSink('lake/orders').",
    ),
    (
        lambda: pipeline(transform="parse"),
        "transform='parse' is not a function. Write transform=a function of a Spark DataFrame.",
    ),
    (
        lambda: pipeline(workers=4),
        "workers=4 is not a Fleet. Write workers=Fleet(min=1, max=4).",
    ),
    (
        lambda: pipeline(settings_overrides={"lease": {"failover_time_milis": 1}}),
        "lease.failover_time_milis is not a setting. Did you mean lease.failover_time_millis?",
    ),
    (
        lambda: pipeline(settings_overrides={"lease": {"failover_time_millis": "5"}}),
        (
            "lease.failover_time_millis='5' is not a whole number. Write a time in "
            "milliseconds, 100 or more."
        ),
    ),
    (
        lambda: pipeline(spark_config={"spark.executor.cores": 4}),
        "spark_config['spark.executor.cores'] is of type int, not a string. Write it in quotes.",
    ),
    (
        lambda: pipeline(output_asset_key="lake/or ders"),
        (
            "output_asset_key='lake/or ders' is not an asset key of the characters A-Z a-z "
            "0-9 _ . -. Write ['lake', 'orders'], 'lake/orders' or an AssetKey."
        ),
    ),
    (
        lambda: pipeline(strems=["orders"]),
        "strems is not an argument of KinesisPipeline. Did you mean streams?",
    ),
    (
        lambda: Fleet(min=0),
        "Fleet min=0 is too small. Write a number of workers, 1 or more.",
    ),
    (
        lambda: Fleet(min=3, max=2),
        "Fleet max=2 is less than min=3. Write max=3 or more.",
    ),
    (
        lambda: Fleet(run_hours=0),
        "Fleet run_hours=0 is too small. Write a time in hours, 0.001 to 8760, or None.",
    ),
    (
        lambda: Fleet(run_tags={"kcl/mode": "x"}),
        "Fleet run_tags['kcl/mode'] is a tag of kcl_pipeline or Dagster. Leave it out.",
    ),
    (
        lambda: CheckLimits(lag_error_seconds=-1),
        "lag_error_seconds=-1 is too small. Write a time in seconds, 0 to 31536000.",
    ),
    (
        lambda: pipeline().definitions(group_nam="shop"),
        "group_nam is not an option. Did you mean group_name?",
    ),
    (
        lambda: pipeline().definitions(group_name="my shop"),
        (
            "group_name='my shop' is not a group name. Write 1 to 100 of the characters A-Z "
            "a-z 0-9 _, or None."
        ),
    ),
    (
        lambda: pipeline().definitions(owners="team:shop"),
        "owners='team:shop' is a string. Write owners=['team:shop'].",
    ),
    (
        lambda: pipeline().definitions(tags={"tier": 1}),
        "tags['tier']=1 is not a string. Write '1'.",
    ),
    (
        lambda: pipeline().definitions(aws=7),
        (
            "aws=7 is not an AwsResource. Write AwsResource(...), the key of a resource, such"
            " as 'aws', or None."
        ),
    ),
    (
        lambda: pipeline().definitions(spark=7),
        (
            "spark=7 has no Spark session. Write SparkResource(...), PySparkResource(...) or "
            "LazyPySparkResource(...), or None."
        ),
    ),
    (
        lambda: pipeline().definitions(progress_seconds=0),
        "progress_seconds=0 is too small. Write a time in seconds, 0.1 to 86400.",
    ),
    (
        lambda: pipeline().definitions(leader_default_running="yes"),
        "leader_default_running='yes' is not True or False. Write True or False.",
    ),
    (
        lambda: pipeline().definitions(asset_attributes={"tag": {}}),
        (
            "asset_attributes['tag'] is not an attribute of the output that can be set. Did "
            "you mean tags?"
        ),
    ),
]


@pytest.mark.parametrize(("construct", "sentence"), WRONG)
def test_a_wrong_option_is_refused_with_what_to_write(
    construct: Callable[[], object], sentence: str
) -> None:
    with pytest.raises(SettingsError) as raised:
        construct()
    assert str(raised.value) == sentence
