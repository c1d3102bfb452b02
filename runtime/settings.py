"""The service's settings: the only place that reads the environment."""

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from handler.strategies import DEFAULT_STRATEGY, STRATEGIES
from models.manifest import is_model_name

MOST_PIXELS: Final = 178_956_970
"""Beyond it Pillow itself refuses an image."""
_PREFIX = "CICADA_"
_ORIGIN: Final = re.compile(
    r"https?://[a-z0-9.-]+(:[0-9]{1,5})?|https?://\[[0-9a-f:]+\](:[0-9]{1,5})?"
)


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


def _listed(value: object) -> object:
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _origins(origins: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for origin in origins or ():
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin!r} is no origin, expected '*' or such as https://example.org"
            )
    return origins


def _keys(keys: tuple[SecretStr, ...] | None) -> tuple[SecretStr, ...] | None:
    for key in keys or ():
        if re.fullmatch(r"[!-+\--~]{8,256}", key.get_secret_value()) is None:
            raise ValueError("expected keys of 8 to 256 visible ASCII characters, between commas")
    return keys


def _collector(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or not url.isascii():
        raise ValueError(
            "expected the URL of an OTLP/HTTP collector, such as http://localhost:4318"
        )
    return url


class Settings(BaseSettings):
    """Read from the environment: `CICADA_WEIGHTS` is `weights`; those of others' making have their own names."""

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
    bodies_bytes: int | None = Field(default=None, ge=1)
    processing: str | None = Field(default=None, min_length=1, max_length=4096)
    max_pixels: int = Field(default=50_000_000, ge=1, le=MOST_PIXELS)
    header_timeout_s: float = Field(default=10.0, gt=0, le=3600, allow_inf_nan=False)
    body_timeout_s: float = Field(default=60.0, gt=0, le=3600, allow_inf_nan=False)
    keep_alive_s: float = Field(default=75.0, gt=0, le=3600, allow_inf_nan=False)
    drain_s: float = Field(default=8.0, ge=0, le=3600, allow_inf_nan=False)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    verify: bool = False
    api_keys: Annotated[
        tuple[SecretStr, ...] | None, NoDecode, BeforeValidator(_listed), AfterValidator(_keys)
    ] = None
    keys_for_health: bool = False
    keys_for_metrics: bool = False
    cors_origins: Annotated[
        tuple[str, ...] | None, NoDecode, BeforeValidator(_listed), AfterValidator(_origins)
    ] = None
    otlp_endpoint: Annotated[str, AfterValidator(_collector)] | None = Field(
        default=None, validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    host: str = Field(default="0.0.0.0", min_length=1, validation_alias="HOST")  # noqa: S104 a container's
    port: int = Field(default=8080, ge=0, le=65535, validation_alias="PORT")

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise SettingsError(_sentence(error)) from None


def variable(field: str) -> str:
    """The environment variable of a setting: `timeout_s` -> `CICADA_TIMEOUT_S`."""
    alias = Settings.model_fields[field].validation_alias
    return alias if isinstance(alias, str) else _PREFIX + field.upper()


def _sentence(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    place = str(first["loc"][0])
    name = variable(place) if place in Settings.model_fields else place
    problem = first["msg"].removeprefix("Value error, ")
    found = "not usable" if place == "api_keys" else repr(first["input"])  # keys are never shown
    return f"{name} is {found}: {problem[0].lower()}{problem[1:]}"
