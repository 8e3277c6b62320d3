"""Report wrong fields of a model that users construct, in one sentence."""

from typing import Any, ClassVar

from pydantic import BaseModel, ValidationError

from kcl_pipeline.settings_errors import check_names, refuse_settings


class CheckedFields(BaseModel):
    """Base of models whose constructor refuses unknown names and wrong values.

    Dagster's own resources ignore an unknown name, so that a misspelt `endpoint_url` would send the
    calls to the real AWS. The errors of pydantic show the value of a secret.

    Attributes:
        named: A field in messages, such as `an option`. Empty: `a field of` and the class.

    Raises:
        SettingsError: A name is unknown, or a value is wrong.
    """

    named: ClassVar[str] = ""

    def __init__(self, **given: Any) -> None:
        cls = type(self)
        check_names(given, list(cls.model_fields), cls.named or f"a field of {cls.__name__}")
        try:
            super().__init__(**given)
        except ValidationError as error:
            refuse_settings(error, cls)
