"""What a person did wrong, or what AWS refused, as one sentence; anything else keeps its traceback,
because it is a defect.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, Final

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from kcl_pipeline.cli import show
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError, KclError, NotFoundError, UnavailableError
from kcl_pipeline.settings_errors import settings_sentence
from kcl_pipeline.text import printable

FAILED: Final = 1
_SPACES: Final = re.compile(r"\s+")
_NO_CREDENTIALS: Final = (
    "no AWS credentials were found; set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY (any text will do for the embedded AWS), or "
    "AWS_PROFILE"
)


class SentenceGroup(TyperGroup):
    """Runs commands; an error that `sentence` knows is printed as one line, and the exit code
    is 1.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments. One with characters that do not print is refused: the usage errors
        of the library would print it as it is.
        """
        for argument in args:
            if not argument.isprintable():
                shown = printable(argument)
                raise typer.BadParameter(f"'{shown}' has characters that do not print", ctx=ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except Exception as error:
            text = sentence(error)
            if text is None:
                raise
            show.echo(f"Error: {text}", err=True)
            raise typer.Exit(FAILED) from None


def sentence(error: BaseException) -> str | None:
    """One sentence for a person; None for an error that is nobody's fault but ours."""
    if isinstance(error, ValidationError):
        return validation_sentence(error)
    if isinstance(error, KclError):
        return _one_line(str(error)) + _advice(error)
    return _botocore_sentence(error)


def validation_sentence(error: ValidationError) -> str:
    """The settings that are wrong, each with its value and what to write instead."""
    written = {"application_name": "--application", "streams": "--stream"}
    return settings_sentence(error, ConsumerSettings, written)


def _advice(error: KclError) -> str:
    if _caused_by(error, "NoCredentialsError"):
        return f" ({_NO_CREDENTIALS})"
    if isinstance(error, NotFoundError):
        return (
            "; check the names, AWS_REGION and AWS_ENDPOINT_URL: tables are made by the "
            "first worker, streams are not"
        )
    if isinstance(error, UnavailableError) and isinstance(error, AwsError):
        return "; check AWS_ENDPOINT_URL, AWS_REGION and the network"
    return ""


def _caused_by(error: BaseException | None, name: str) -> bool:
    while error is not None:
        if type(error).__name__ == name:
            return True
        error = error.__cause__ or error.__context__
    return False


def _botocore_sentence(error: BaseException) -> str | None:
    # an error of botocore can only be here when botocore is loaded already; the command line does
    # not load it for --help
    exceptions = sys.modules.get("botocore.exceptions")
    if exceptions is None:
        return None
    if isinstance(error, exceptions.NoCredentialsError):
        return _NO_CREDENTIALS
    if isinstance(error, exceptions.ClientError):
        return _client_error(error.response, error.operation_name)
    if isinstance(error, exceptions.BotoCoreError):
        return f"{_one_line(str(error))}; check AWS_ENDPOINT_URL, AWS_REGION and the network"
    return None


def _client_error(response: Mapping[str, Any], operation: str) -> str:
    detail = response.get("Error", {})
    return _one_line(
        f"{operation} was refused: {detail.get('Code', '')} {detail.get('Message', '')}"
    )


def _one_line(text: str) -> str:
    return _SPACES.sub(" ", text).strip()
