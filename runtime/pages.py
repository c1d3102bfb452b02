"""The page at `/`: static files of `runtime/page`, which ask nothing but this service's own API."""

import functools
import hashlib
from pathlib import Path
from typing import Final

from fastapi import FastAPI, Request, Response

from runtime.errors import NotFound

FOLDER: Final = Path(__file__).with_name("page")
_INDEX: Final = "index.html"
MEDIA_TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".jpg": "image/jpeg",
    ".svg": "image/svg+xml",
}
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'self'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Nothing is loaded from elsewhere or written in line, and no string becomes markup: names of models and
classes, and errors, are others' words."""


def install(app: FastAPI) -> None:
    """Addresses in the files are relative, so that the page holds behind any prefix."""
    app.add_api_route("/", _page, include_in_schema=False)
    app.add_api_route("/page/{file:path}", _file, include_in_schema=False)


async def _page(request: Request) -> Response:
    return _answer(request, _INDEX)


async def _file(request: Request, file: str) -> Response:
    return _answer(request, file)


def _answer(request: Request, file: str) -> Response:
    """Kept by browsers, and asked for again each time: so all files are of one version of the service."""
    if file not in _files():
        raise NotFound("no such file of the page")
    content, tag = _read(file)
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "ETag": tag,
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    if tag in request.headers.get("If-None-Match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=MEDIA_TYPES[Path(file).suffix], headers=headers)


@functools.cache
def _files() -> frozenset[str]:
    """Those there are: a path that leads elsewhere is none of them."""
    return frozenset(
        path.relative_to(FOLDER).as_posix()
        for path in FOLDER.rglob("*")
        if path.suffix in MEDIA_TYPES
    )


@functools.cache
def _read(file: str) -> tuple[bytes, str]:
    """The content and its entity tag, read once."""
    content = (FOLDER / file).read_bytes()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'
