"""A leader of a pipeline writes moves and scans segments in a bounded number of threads."""

from __future__ import annotations

import threading

from kcl_pipeline import pipeline as pipelines
from kcl_pipeline.aws import AwsClients
from kcl_pipeline.aws.configs import LEADER_THREADS
from kcl_pipeline.delta.sink import DeltaSink


def test_the_calls_of_a_leader_run_at_the_same_time_in_few_threads(monkeypatch, tmp_path):
    built = {}
    monkeypatch.setattr(pipelines, "LeaderCycle", lambda *_, **more: built.update(more))
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    pipeline = pipelines.KinesisPipeline(
        name="orders", streams=["orders"], sink=DeltaSink(str(tmp_path))
    )
    pipeline.build_leader("w-1", clients=AwsClients(pipeline.settings))
    meeting = threading.Barrier(2)

    def meet(_):
        meeting.wait(10)
        return threading.current_thread().name

    threads = set(built["map"](meet, range(4 * LEADER_THREADS)))
    assert 2 <= len(threads) <= LEADER_THREADS
    assert threading.current_thread().name not in threads
