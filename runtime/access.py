"""API keys: where they are set, who has none may neither ask for inference nor see requests."""

import hashlib
import hmac
from collections.abc import Iterable
from typing import Any, Final

from fastapi import Request

from runtime.errors import Unauthorized

KEY_HEADER: Final = "X-API-Key"
_MODEL: Final = "/v2/models/{model}"
_VERSION: Final = f"{_MODEL}/versions/{{version}}"
HEALTH: Final = frozenset(
    {
        "/models",
        "/models/{model}",
        "/strategies",
        "/v2",
        "/v2/health/live",
        "/v2/health/ready",
        _MODEL,
        f"{_MODEL}/ready",
        _VERSION,
        f"{_VERSION}/ready",
        "/ping",
        "/_/health",
        "/_/ready",
    }
)
METRICS: Final = frozenset({"/metrics"})
PUBLIC: Final = frozenset(
    {"/", "/page/{file:path}", "/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css"}
)
_SCHEMES: Final[dict[str, Any]] = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": KEY_HEADER},
}
_REFUSED: Final[dict[str, Any]] = {
    "description": "The request has no valid API key",
    "headers": {"WWW-Authenticate": {"schema": {"type": "string"}, "required": True}},
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}},
}


class Access:
    """Which routes need a key, and whether a request has one.

    A route that is in none of the sets above needs one: a new route is guarded until it is listed.

    keys: none at all: every route is open.
    """

    def __init__(self, keys: Iterable[str], *, health: bool, metrics: bool) -> None:
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = PUBLIC | (frozenset() if health else HEALTH)
        if not metrics:
            self._open |= METRICS

    def guards(self, route: str) -> bool:
        """route: its template, `/predictions/{model}`."""
        return bool(self._digests) and route not in self._open

    async def check(self, request: Request) -> None:
        """A dependency of every route, run before the body is read; raises Unauthorized."""
        if not self.guards(request.scope["route"].path):
            return
        given = _given_key(request)
        if given is None:
            raise Unauthorized(f"expected an API key in Authorization: Bearer, or in {KEY_HEADER}")
        if not self._knows(given):
            raise Unauthorized("the API key is not known")

    def describe(self, description: dict[str, Any]) -> None:
        """Adds the keys to an OpenAPI description (`runtime/documentation.py`)."""
        if not self._digests:
            return
        description["components"]["securitySchemes"] = _SCHEMES
        for path, operations in description["paths"].items():
            if self.guards(path):
                for operation in operations.values():
                    operation["security"] = [{scheme: []} for scheme in _SCHEMES]
                    headers = {**operation["responses"]["200"]["headers"], **_REFUSED["headers"]}
                    common = {name: headers[name] for name in ("X-Request-ID", "WWW-Authenticate")}
                    operation["responses"]["401"] = {**_REFUSED, "headers": common}

    def _knows(self, given: bytes) -> bool:
        """In the same time whichever key it is, and wherever a wrong one differs."""
        digest = _digest(given)
        found = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(found)


def _given_key(request: Request) -> bytes | None:
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    given = credentials.strip() if scheme.lower() == "bearer" else request.headers.get(KEY_HEADER)
    return given.encode("latin-1") if given else None


def _digest(key: bytes) -> bytes:
    """Of one length for all keys, so that comparing tells nothing of theirs."""
    return hashlib.sha256(key).digest()
