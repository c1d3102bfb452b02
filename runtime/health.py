"""The image's own health check: whether the service of this container is ready, asked over HTTP as a platform does."""

import http.client
import ipaddress
import json

from runtime.settings import Settings

TIMEOUT_S = 4.0


def why_not_ready(settings: Settings) -> str | None:
    """None when the service that has these settings is ready; otherwise one sentence."""
    connection = http.client.HTTPConnection(_address(settings.host), settings.port, TIMEOUT_S)
    try:
        connection.request("GET", "/v2/health/ready", headers=_key(settings))
        answer = connection.getresponse()
        body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        return f"no answer on port {settings.port}: {error}"
    finally:
        connection.close()
    return None if answer.status == 200 else _sentence(answer.status, body)


def _address(host: str) -> str:
    """Where a service that listens on `host` is reached from beside it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if not address.is_unspecified:
        return host
    return "127.0.0.1" if address.version == 4 else "::1"


def _key(settings: Settings) -> dict[str, str]:
    if settings.keys_for_health and settings.api_keys:
        return {"X-API-Key": settings.api_keys[0].get_secret_value()}
    return {}


def _sentence(status: int, body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"answered {status}"
