"""Print expected errors as one sentence.

Wrong settings and refused AWS calls are expected. Every other error is a defect of this package
and keeps its traceback. With `--json`, standard output gets the sentence as JSON, too, so that it
always has one value.
"""

import re
import sys
from typing import Any, Final

import typer
from pydantic import ValidationError
from typer.core import TyperGroup

from kcl_pipeline.cli import show
from kcl_pipeline.cli.exit_codes import FAILED
from kcl_pipeline.config import ConsumerSettings
from kcl_pipeline.errors import AwsError, KclError, NotFoundError, UnavailableError
from kcl_pipeline.settings_errors import settings_sentence
from kcl_pipeline.text import printable

JSON_OPTION: Final = "--json"
INTERRUPTED_TEXT: Final = "interrupted"
_SPACES: Final = re.compile(r"\s+")
_NO_CREDENTIALS: Final = (
    "no AWS credentials were found; set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY (any value works for the embedded AWS), or "
    "AWS_PROFILE"
)


class SentenceGroup(TyperGroup):
    """Group of commands that prints expected errors as one line and exits with code 1."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Parse the arguments before the command. An error of the library gets its JSON here."""
        if parent is not None:  # the outer group answers for its sub-commands
            return super().make_context(info_name, args, parent, **extra)
        show.escape_what_cannot_be_encoded()
        as_json = JSON_OPTION in args  # before the library consumes the list
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except Exception as error:
            _print_error(error, as_json=as_json)
            raise
        context.meta[JSON_OPTION] = as_json
        return context

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments and reject those with non-printable characters.

        The library's usage errors would print them unescaped.
        """
        for argument in args:
            if not argument.isprintable():
                shown = printable(argument)
                text = f"'{shown}' has non-printable characters; remove them"
                raise typer.BadParameter(text, ctx=ctx)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        if ctx.parent is not None:
            return super().invoke(ctx)
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except (Exception, KeyboardInterrupt) as error:
            _print_error(error, as_json=ctx.meta[JSON_OPTION])
            text = sentence(error)
            if text is None:
                raise
            show.echo(f"Error: {text}", err=True)
            raise typer.Exit(FAILED) from None


def _print_error(error: BaseException, *, as_json: bool) -> None:
    """Print the JSON value of a command that ended with an error. It has printed no other one."""
    if as_json and not isinstance(error, typer.Exit | typer.Abort):
        show.print_json({"error": _reason(error)})


def _reason(error: BaseException) -> str:
    """The sentence of an error, of wrong arguments, of Ctrl-C or of a defect."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED_TEXT
    if (text := sentence(error)) is not None:
        return text
    usage = getattr(error, "format_message", None)  # typer does not export their base class
    return _one_line(str(usage()) if callable(usage) else f"{type(error).__name__}: {error}")


def sentence(error: BaseException) -> str | None:
    """The message of an expected error; None for a defect of this package."""
    if isinstance(error, ValidationError):
        options = {"application_name": "--application", "streams": "--stream"}
        return settings_sentence(error, ConsumerSettings, options)
    if isinstance(error, KclError):
        return _one_line(str(error)) + _advice(error)
    return _botocore_sentence(error)


def _advice(error: KclError) -> str:
    if _caused_by(error, "NoCredentialsError"):
        return f" ({_NO_CREDENTIALS})"
    # Without a code of AWS, a worker or a lease of an existing application was not found.
    if isinstance(error, NotFoundError) and error.code:
        return (
            "; if no worker has run yet, start one: it creates the tables, but not the streams. "
            "Otherwise check the names, AWS_REGION and AWS_ENDPOINT_URL"
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
    # Not imported here, so that --help stays fast: its errors exist only if it is loaded.
    exceptions = sys.modules.get("botocore.exceptions")
    if exceptions is None:
        return None
    if isinstance(error, exceptions.NoCredentialsError):
        return _NO_CREDENTIALS
    if isinstance(error, exceptions.ClientError):
        detail = error.response.get("Error", {})
        code, message = detail.get("Code", ""), detail.get("Message", "")
        return _one_line(f"AWS refused {error.operation_name}: {code} {message}")
    if isinstance(error, exceptions.BotoCoreError):
        return f"{_one_line(str(error))}; check AWS_ENDPOINT_URL, AWS_REGION and the network"
    return None


def _one_line(text: str) -> str:
    return _SPACES.sub(" ", text).strip()
