"""The session, Java, and the address of a master."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kcl_pipeline.cli.doctor.setup import check_java
from kcl_pipeline.errors import SettingsError
from kcl_pipeline.spark.java import java_version, require_java, require_user_name
from kcl_pipeline.spark.session import (
    build_session,
    prepare_process,
    require_master,
    session_settings,
)


def test_the_session_has_the_measured_settings_and_is_reused(spark) -> None:
    assert build_session("another", {"spark.sql.shuffle.partitions": "2"}) is spark
    for key, value in {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.adaptive.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
        "spark.ui.enabled": "false",
        "spark.python.unix.domain.socket.enabled": "true",
    }.items():
        assert spark.conf.get(key) == value, key
    assert spark.sparkContext.getConf().get("spark.driver.bindAddress") == "127.0.0.1"


def test_settings_of_a_cluster_are_not_a_laptops() -> None:
    cluster = session_settings({"spark.master": "spark://host:7077", "spark.ui.enabled": "true"})
    assert "spark.sql.adaptive.enabled" not in cluster
    assert "spark.driver.bindAddress" not in cluster
    assert cluster["spark.ui.enabled"] == "true"
    assert session_settings({"spark.master": "local[3]"})["spark.sql.shuffle.partitions"] == "3"
    assert session_settings({"spark.master": "local"})["spark.sql.shuffle.partitions"] == "1"


def _java(folder: Path, text: str) -> Path:
    command = folder / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(f"#!/bin/sh\necho '{text}' >&2\n")
    command.chmod(0o755)
    return folder


def test_java_is_asked_for_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = _java(tmp_path / "old", 'openjdk version "1.8.0_392"')
    new = _java(tmp_path / "new", 'openjdk version "21.0.2" 2024-01-16')
    odd = _java(tmp_path / "odd", "what?")
    assert (
        java_version(str(old / "bin/java")),
        java_version(str(new / "bin/java")),
        java_version(str(odd / "bin/java")),
    ) == (8, 21, None)
    monkeypatch.setenv("JAVA_HOME", str(new))
    assert require_java() == 21
    for home, message in [
        (old, "is Java 8"),
        (odd, "no usable java under JAVA_HOME"),
        (tmp_path / "none", "no usable java under JAVA_HOME"),
    ]:
        monkeypatch.setenv("JAVA_HOME", str(home))
        with pytest.raises(SettingsError, match=message) as caught:
            require_java()
        assert "\n" not in str(caught.value)
        assert "openjdk-17-jre-headless" in str(caught.value)
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SettingsError, match="on PATH"):
        require_java()


def test_an_unreachable_master_is_one_sentence_before_a_jvm_starts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It gave 107 log lines."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        require_master(f"spark://127.0.0.1:1,127.0.0.1:{port}")
    for master in ("spark://127.0.0.1:1", f"spark://127.0.0.1:{port},x:y", "spark://nowhere"):
        with pytest.raises(SettingsError, match=r"^spark\.master=spark://.* cannot be reached"):
            require_master(master)
    for master in ("local[2]", "yarn", "k8s://https://x"):
        require_master(master)
    captured = capfd.readouterr()
    assert captured.out + captured.err == ""


def test_a_user_id_without_a_name_is_refused_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(user_id: int) -> object:
        raise KeyError(f"getpwuid(): uid not found: {user_id}")

    require_user_name()
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    monkeypatch.setattr("pwd.getpwuid", missing)
    with pytest.raises(SettingsError, match=r"the user id 12345 .*useradd --uid 12345") as caught:
        prepare_process()
    assert "\n" not in str(caught.value)
    found = check_java(needed=True, require=lambda: 21)
    assert "the user id 12345" in found.sentence
    assert "useradd" in found.advice
