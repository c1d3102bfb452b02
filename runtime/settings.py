"""The service's settings: the only place that reads the environment."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from handler.strategies import DEFAULT_STRATEGY, STRATEGIES
from models.manifest import is_model_name

_PREFIX = "CICADA_"
_UNPREFIXED = ("host", "port")


class SettingsError(Exception):
    """A setting's value cannot be used: one sentence that names the variable."""


def _known_strategy(name: str) -> str:
    if name not in STRATEGIES:
        raise ValueError(f"expected one of {', '.join(STRATEGIES)}")
    return name


def _model_name(name: str) -> str:
    if not is_model_name(name):
        raise ValueError("expected a model name: lower-case letters, digits, '.', '_', '-'")
    return name


class Settings(BaseSettings):
    """Read from the environment (`CICADA_WEIGHTS` is `weights`; `HOST` and `PORT` have no prefix)."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_ignore_empty=True, frozen=True, populate_by_name=True
    )

    weights: Path = Path("weights")
    default_model: Annotated[str, AfterValidator(_model_name)] | None = None
    strategy: Annotated[str, AfterValidator(_known_strategy)] = DEFAULT_STRATEGY
    handlers: int = Field(default=1, ge=1, le=256)
    threads: int | None = Field(default=None, ge=1, le=1024)
    queue: int = Field(default=64, ge=0, le=65536)
    timeout_s: float = Field(default=60.0, gt=0, le=86400, allow_inf_nan=False)
    max_body_bytes: int = Field(default=32 << 20, ge=1, le=4 << 30)
    drain_s: float = Field(default=8.0, ge=0, le=3600, allow_inf_nan=False)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    host: str = Field(default="0.0.0.0", min_length=1, validation_alias="HOST")  # noqa: S104 a container's
    port: int = Field(default=8080, ge=0, le=65535, validation_alias="PORT")

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise SettingsError(_sentence(error)) from None


def variable(field: str) -> str:
    """The environment variable of a setting: `timeout_s` -> `CICADA_TIMEOUT_S`."""
    name = field.upper()
    return name if field in _UNPREFIXED else _PREFIX + name


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    field = str(first["loc"][0]).lower()
    problem = first["msg"].removeprefix("Value error, ")
    return f"{variable(field)} is {first['input']!r}: {problem[0].lower()}{problem[1:]}"
