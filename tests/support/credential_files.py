"""The configuration files of AWS in a folder of a test."""

from __future__ import annotations

from pathlib import Path


class ProfileFiles:
    """The shared credentials file and the configuration file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.credentials = folder / "credentials"
        self.configuration = folder / "config"

    def environment(self) -> dict[str, str]:
        """Variables that name the files and the region, and no other source of credentials."""
        return {
            "AWS_SHARED_CREDENTIALS_FILE": str(self.credentials),
            "AWS_CONFIG_FILE": str(self.configuration),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_REGION": "us-east-1",
        }

    def write(self, key: str, profile: str = "default") -> None:
        """Write a key pair into the file."""
        self.credentials.write_text(_pair(key, profile))

    def replace(self, key: str, profile: str = "default") -> None:
        """Put another file in the place of the file."""
        new = self.folder / "new"
        new.write_text(_pair(key, profile))
        new.replace(self.credentials)

    def write_configuration(self, lines: str) -> None:
        """Write the default profile of the configuration file."""
        self.configuration.write_text(f"[default]\n{lines}")


def _pair(key: str, profile: str) -> str:
    return (
        f"[{profile}]\naws_access_key_id={key}\naws_secret_access_key=s\naws_session_token=token\n"
    )
