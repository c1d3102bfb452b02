"""The OpenAPI description, completed, and Swagger UI over it at `/docs`, which needs no network.

The routes say what they take and answer; what holds for all of them is added here.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from starlette.responses import FileResponse

from runtime.descriptions import (
    FIGURES,
    INFERENCE_PARAMETERS,
    REQUEST_ID,
    REQUEST_ID_HEADER,
    RETRY_AFTER,
    TRACE_HEADERS,
)
from runtime.errors import ErrorBody
from runtime.visit import ID_HEADER

DESCRIPTION: Final = """\
Image classification, and torch models of one's own, built, loaded and run for each request.

Every answer carries `X-Request-ID`; `HEAD` is answered wherever `GET` is; a method that a path has not is answered
with 405 and `Allow`, an unknown path with 404, both as `{"error": "one sentence"}` like every other error. On any path
what is no valid HTTP/1.1 is answered with 400, headers that come too slowly with 408, too large ones with 431. To pages
of the origins that the service names, answers carry CORS headers and `Timing-Allow-Origin`."""

_ASSETS: Final = Path(__file__).with_name("swagger_ui")
_MEDIA_TYPES: Final = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
}
_METHODS: Final = ("get", "post")
_TRY_AGAIN: Final = (429, 503)
_ERROR_BODY: Final = {"$ref": "#/components/schemas/ErrorBody"}


def install(app: FastAPI) -> None:
    def description() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = describe(app)
            app.state.access.describe(app.openapi_schema)
        return app.openapi_schema

    # As FastAPI's documentation says to extend it.
    app.openapi = description  # type: ignore[method-assign]
    app.add_api_route("/docs", _page, include_in_schema=False)
    for name in _MEDIA_TYPES:
        app.add_api_route(f"/docs/{name}", _asset, include_in_schema=False)


def describe(app: FastAPI) -> dict[str, Any]:
    """FastAPI's description of the routes, with what is true of every one of them."""
    described = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    for operation in _operations(described):
        responses = operation["responses"]
        infers = FIGURES.keys() <= responses["200"].get("headers", {}).keys()
        more = [REQUEST_ID, *(INFERENCE_PARAMETERS if infers else ())]
        operation["parameters"] = [*operation.get("parameters", []), *more]
        responses.pop("422", None)  # the framework's; here it is 400
        responses.setdefault("500", {"description": "A fault of the service"})
        for status, response in responses.items():
            _complete_response(int(status), response, TRACE_HEADERS if infers else {})
    schemas = described["components"]["schemas"]
    schemas["ErrorBody"] = ErrorBody.model_json_schema()
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    return described


def _complete_response(status: int, response: dict[str, Any], more: dict[str, Any]) -> None:
    headers = {**response.get("headers", {}), ID_HEADER: REQUEST_ID_HEADER, **more}
    response["headers"] = (
        {**headers, "Retry-After": RETRY_AFTER} if status in _TRY_AGAIN else headers
    )
    if status >= 400:
        response["content"] = {"application/json": {"schema": _ERROR_BODY}}


def _operations(described: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in described["paths"].values():
        yield from (path[method] for method in _METHODS if method in path)


async def _page() -> Response:
    """Every address in it is relative, so that it holds behind any prefix."""
    return get_swagger_ui_html(
        openapi_url="openapi.json",
        title="Cicada",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="data:,",
        # Swagger UI would ask a validator on the network otherwise.
        swagger_ui_parameters={"validatorUrl": None},
    )


async def _asset(request: Request) -> Response:
    name = request.url.path.rpartition("/")[2]
    return FileResponse(
        _ASSETS / name,
        media_type=_MEDIA_TYPES[name],
        headers={"Cache-Control": "public, max-age=86400"},
    )
