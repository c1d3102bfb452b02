"""Every error that a caller of the service can see, with its HTTP status.

ServiceError                    500
    BadInput                    400   the request says what cannot be done
    Unauthorized                401   WWW-Authenticate: API keys are set, and the request has none of them
    NotFound                    404   no such model, version or request
    TooSlow                     408   headers or body took too long
    BodyTooLarge                413
    UnsupportedMediaType        415
        UnsupportedCoding       415   Accept-Encoding
    QueueFull                   429   Retry-After
    HeadersTooLarge             431
    CallerLeft                  499   the caller closed the connection: in log and metrics only
    Fault                       500   a fault of ours, or of the files we were given
    HandlerDied                 502   the handler ended while it worked on the request
    Unavailable                 503   Retry-After: not ready, or draining
    OverTime                    504   over the time limit

The message is one sentence for the caller: what was wrong, what was found, what was expected.
"""

import reprlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import ClassVar, Final, Self

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from runtime.answers import Json


class ServiceError(Exception):
    status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def headers(self) -> Mapping[str, str]:
        return {}


class BadInput(ServiceError):
    status = 400


class Unauthorized(ServiceError):
    status = 401

    @property
    def headers(self) -> Mapping[str, str]:
        # The body is not read, as with BodyTooLarge.
        return {"WWW-Authenticate": 'Bearer realm="cicada"', "Connection": "close"}


class NotFound(ServiceError):
    status = 404


class _Cut(ServiceError):
    """What is left of the request is not read, so nothing after it on this connection could be."""

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Connection": "close"}


class TooSlow(_Cut):
    status = 408


class BodyTooLarge(_Cut):
    status = 413


class HeadersTooLarge(_Cut):
    status = 431


class UnsupportedMediaType(ServiceError):
    status = 415


class UnsupportedCoding(UnsupportedMediaType):
    @property
    def headers(self) -> Mapping[str, str]:
        return {"Accept-Encoding": "gzip, identity"}  # RFC 9110, section 15.5.16


class _TryAgain(ServiceError):
    retry_after_s: ClassVar[int] = 1

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Retry-After": str(self.retry_after_s)}


class QueueFull(_TryAgain):
    status = 429


class CallerLeft(ServiceError):
    status = 499


class Fault(ServiceError):
    status = 500

    @classmethod
    def unexpected(cls) -> Self:
        return cls("an unexpected fault of the service; its log says more under this request's id")


class HandlerDied(ServiceError):
    status = 502


class Unavailable(_TryAgain):
    status = 503


class BodiesFull(Unavailable):
    """What is left of the body is not read."""

    @property
    def headers(self) -> Mapping[str, str]:
        return {**super().headers, "Connection": "close"}


class OverTime(ServiceError):
    status = 504


_BRIEF: Final = reprlib.Repr()
_BRIEF.maxstring = 80  # a model's name is no longer than 64


def brief(value: object) -> str:
    """What a caller sent, to be quoted in a sentence: of a length that fits one."""
    return _BRIEF.repr(value)


_FROM_HANDLER: Final[Mapping[int, type[ServiceError]]] = {
    error.status: error for error in (BadInput, NotFound, CallerLeft, Fault, Unavailable)
}


def from_handler(status: int, message: str) -> ServiceError:
    """The error that a handler's `error` frame stands for."""
    return _FROM_HANDLER.get(status, Fault)(message)


class ErrorBody(BaseModel):
    """What every error answer holds."""

    error: str = Field(description="One sentence: what was wrong and what was expected.")


def render(request: Request, error: ServiceError) -> Response:
    request.state.record.error = error.message
    return Json({"error": error.message}, status=error.status, headers=error.headers)


def install(app: FastAPI) -> None:
    """Makes every error of the application, the framework's own included, answer `{"error": ...}`."""

    @app.exception_handler(ServiceError)
    async def _service_error(request: Request, error: ServiceError) -> Response:
        return render(request, error)

    @app.exception_handler(RequestValidationError)
    async def _validation_error(request: Request, error: RequestValidationError) -> Response:
        return render(request, BadInput(_first_problem(error)))

    @app.exception_handler(HTTPException)
    async def _framework_error(request: Request, error: HTTPException) -> Response:
        message = _framework_sentence(request, error)
        return Json({"error": message}, status=error.status_code, headers=error.headers or {})


def _first_problem(error: RequestValidationError) -> str:
    first = error.errors()[0]
    place, *path = (str(part) for part in first["loc"])
    message = first["msg"]
    return f"{place} {'.'.join(path)}: {message[0].lower()}{message[1:]}".replace(" :", ":")


def _framework_sentence(request: Request, error: HTTPException) -> str:
    if error.status_code == HTTPStatus.NOT_FOUND:
        return "no such path; /docs lists the paths there are"
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{request.method} is not allowed on this path, expected {allowed}"
    return str(error.detail)
