"""Credentials of a process that runs for long follow the files of the profile."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kcl_pipeline.aws import AwsClients, SessionOptions
from kcl_pipeline.config import ConsumerSettings
from tests.support.credential_files import ProfileFiles

SETTINGS = ConsumerSettings(application_name="app", streams=("s",))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileFiles:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    found = ProfileFiles(tmp_path)
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    found.write("OLD")
    return found


def key_of(clients: AwsClients) -> str:
    """The access key that the client signs its next request with."""
    signed: list[str] = []

    def sign(request: object, **_: object) -> None:
        signed.append(request.headers["Authorization"])  # type: ignore[attr-defined]
        raise ConnectionError("not sent")

    client = clients.dynamodb
    client.meta.events.register_first("before-send.dynamodb", sign)
    with pytest.raises(ConnectionError):
        client.list_tables()
    client.meta.events.unregister("before-send.dynamodb", sign)
    return str(signed[0]).partition("Credential=")[2].partition("/")[0]


@pytest.mark.parametrize("profile", [None, "team"])
def test_a_replaced_key_pair_is_used_by_the_same_client(
    files: ProfileFiles, profile: str | None
) -> None:
    files.write("OLD", profile or "default")
    clients = AwsClients(SETTINGS, SessionOptions(profile_name=profile))
    assert key_of(clients) == "OLD"
    files.write("NEW", profile or "default")
    assert key_of(clients) == "NEW"
    files.replace("NEWER", profile or "default")
    assert key_of(clients) == "NEWER"


def test_a_file_that_cannot_be_used_changes_nothing(files: ProfileFiles) -> None:
    clients = AwsClients(SETTINGS)
    assert key_of(clients) == "OLD"
    for broken in ("[default", "[default]\naws_access_key_id=HALF\n", "[other]\n", ""):
        files.credentials.write_text(broken)
        assert key_of(clients) == "OLD"
    files.credentials.unlink()
    assert key_of(clients) == "OLD"
    files.write("NEW")
    assert key_of(clients) == "NEW"


def test_a_pair_in_the_configuration_file_is_followed(files: ProfileFiles) -> None:
    files.credentials.unlink()
    files.write_configuration("aws_access_key_id=OLD\naws_secret_access_key=s\n")
    clients = AwsClients(SETTINGS)
    assert key_of(clients) == "OLD"
    files.write_configuration("aws_access_key_id=NEW\naws_secret_access_key=s\n")
    assert key_of(clients) == "NEW"


def test_a_process_of_credentials_is_run_again(files: ProfileFiles) -> None:
    files.credentials.unlink()
    answer = '{"Version": 1, "AccessKeyId": "%s", "SecretAccessKey": "s"}'
    script = files.folder / "answer.json"
    script.write_text(answer % "OLD")
    files.write_configuration(f"credential_process=cat {script}\n")
    clients = AwsClients(SETTINGS)
    assert key_of(clients) == "OLD"
    script.write_text(answer % "NEW")
    files.write_configuration(f"credential_process=cat  {script}\n")
    assert key_of(clients) == "NEW"


def test_keys_of_the_environment_and_of_the_settings_win(
    files: ProfileFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = AwsClients(SETTINGS, SessionOptions(aws_access_key_id="OWN", aws_secret_access_key="s"))
    assert key_of(own) == "OWN"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    clients = AwsClients(SETTINGS)
    files.write("NEW")
    assert (key_of(own), key_of(clients)) == ("OWN", "ENV")


def test_no_credentials_are_none(files: ProfileFiles) -> None:
    files.credentials.unlink()
    assert not AwsClients(SETTINGS).has_credentials()
