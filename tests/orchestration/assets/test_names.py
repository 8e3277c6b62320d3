"""Asset keys that two assets of one pipeline would share."""

from __future__ import annotations

import re

import dagster as dg
import pytest

from kcl_pipeline import DeltaSink, KinesisPipeline, StreamSelector
from kcl_pipeline.errors import SettingsError


def pipeline(name="orders", streams=("a",), uri="lake/events", key=None):
    def unchanged(table):
        return table

    return KinesisPipeline(
        name=name,
        streams=streams,
        transform_arrow=unchanged,
        sink=DeltaSink(uri),
        output_asset_key=key,
    )


@pytest.mark.parametrize(
    ("arguments", "key", "given", "other"),
    [
        ({"uri": "lake/fleet"}, None, "orders/fleet", "the fleet"),
        ({"uri": "s3://lake/fleet/"}, None, "orders/fleet", "the fleet"),
        (
            {"streams": StreamSelector(prefix="a-"), "uri": "lake/streams"},
            None,
            "orders/streams",
            "the selected streams",
        ),
        ({"name": "kinesis", "uri": "lake/a"}, None, "kinesis/a", "a stream"),
        ({}, ["kinesis", "a"], "kinesis/a", "a stream"),
        ({}, "orders/fleet", "orders/fleet", "the fleet"),
    ],
)
def test_an_output_with_the_key_of_another_asset_is_refused(arguments, key, given, other):
    how = "output_asset_key" if key else "derived from the address of the table"
    sentence = f"the asset key {given} of the output ({how}) is that of {other}. Write another"
    with pytest.raises(SettingsError, match=re.escape(sentence)):
        pipeline(**arguments, key=key).definitions()


def test_an_application_that_shares_keys_with_its_streams_is_refused():
    with pytest.raises(SettingsError, match="has a stream and its fleet with the asset key"):
        pipeline(name="kinesis", streams=("fleet",)).definitions()


@pytest.mark.parametrize(
    "arguments",
    [
        {"uri": "lake/streams"},
        {"name": "kinesis"},
        {"streams": ("fleet",)},
        {"uri": "lake/a"},
        {"streams": StreamSelector(prefix="a-")},
    ],
)
def test_keys_that_differ_are_loaded(arguments):
    dg.Definitions.validate_loadable(pipeline(**arguments).definitions())


def test_a_given_key_replaces_a_derived_one_that_would_clash():
    found = pipeline(uri="lake/fleet", key="lake/events").definitions()
    dg.Definitions.validate_loadable(found)
