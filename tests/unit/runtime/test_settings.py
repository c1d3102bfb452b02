from pathlib import Path

import pytest
from pydantic import SecretStr

from runtime.settings import Settings, SettingsError, variable


def test_defaults() -> None:
    settings = Settings()
    assert settings.weights == Path("weights")
    assert settings.default_model is None
    assert settings.strategy == "cicada"
    assert (settings.host, settings.port) == ("0.0.0.0", 8080)  # noqa: S104
    assert settings.max_body_bytes == 32 * 1024 * 1024


def test_every_setting_is_read_from_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "CICADA_WEIGHTS": "/elsewhere",
        "CICADA_DEFAULT_MODEL": "vit_b_16",
        "CICADA_STRATEGY": "pisel",
        "CICADA_HANDLERS": "3",
        "CICADA_THREADS": "4",
        "CICADA_QUEUE": "5",
        "CICADA_TIMEOUT_S": "6.5",
        "CICADA_MAX_BODY_BYTES": "7",
        "CICADA_BODIES_BYTES": "77",
        "CICADA_MAX_PIXELS": "8",
        "CICADA_PROCESSING": "mine.py",
        "CICADA_HEADER_TIMEOUT_S": "0.5",
        "CICADA_BODY_TIMEOUT_S": "1.5",
        "CICADA_KEEP_ALIVE_S": "2.5",
        "CICADA_DRAIN_S": "0",
        "CICADA_LOG_LEVEL": "debug",
        "CICADA_VERIFY": "true",
        "CICADA_API_KEYS": "first-key, second-key",
        "CICADA_KEYS_FOR_HEALTH": "1",
        "CICADA_KEYS_FOR_METRICS": "1",
        "CICADA_CORS_ORIGINS": "https://a.example, http://b.example:8000",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
        "HOST": "::1",
        "PORT": "9",
    }
    assert set(given) == {variable(name) for name in Settings.model_fields}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert Settings() == Settings(
        weights=Path("/elsewhere"),
        default_model="vit_b_16",
        strategy="pisel",
        handlers=3,
        threads=4,
        queue=5,
        timeout_s=6.5,
        max_body_bytes=7,
        bodies_bytes=77,
        max_pixels=8,
        processing="mine.py",
        header_timeout_s=0.5,
        body_timeout_s=1.5,
        keep_alive_s=2.5,
        drain_s=0,
        log_level="debug",
        verify=True,
        api_keys=(SecretStr("first-key"), SecretStr("second-key")),
        keys_for_health=True,
        keys_for_metrics=True,
        cors_origins=("https://a.example", "http://b.example:8000"),
        otlp_endpoint="http://collector:4318",
        host="::1",
        port=9,
    )


def test_what_is_given_goes_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CICADA_WEIGHTS", "/environment")
    assert Settings(weights=Path("/given")).weights == Path("/given")


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CICADA_DEFAULT_MODEL", "")
    assert Settings().default_model is None


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("PORT", "http", "PORT is 'http': input should be a valid integer"),
        ("PORT", "65536", "PORT is '65536': input should be less than or equal to 65535"),
        (
            "CICADA_HANDLERS",
            "0",
            "CICADA_HANDLERS is '0': input should be greater than or equal to 1",
        ),
        ("CICADA_TIMEOUT_S", "nan", "CICADA_TIMEOUT_S is 'nan': input should be a finite number"),
        ("CICADA_TIMEOUT_S", "0", "CICADA_TIMEOUT_S is '0': input should be greater than 0"),
        (
            "CICADA_STRATEGY",
            "fast",
            "CICADA_STRATEGY is 'fast': expected one of traditional, pisel",
        ),
        ("CICADA_DEFAULT_MODEL", "../x", "CICADA_DEFAULT_MODEL is '../x': expected a model name"),
        (
            "CICADA_CORS_ORIGINS",
            "https://a.example/",
            "CICADA_CORS_ORIGINS is 'https://a.example/': 'https://a.example/' is no origin",
        ),
        (
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "collector:4317",
            "OTEL_EXPORTER_OTLP_ENDPOINT is 'collector:4317': expected the URL",
        ),
    ],
)
def test_a_wrong_value_is_one_sentence_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, sentence: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError) as wrong:
        Settings()
    assert str(wrong.value).startswith(sentence)
    assert "\n" not in str(wrong.value)
