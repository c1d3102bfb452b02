"""Request bodies: read up to the limit and within their time, raw or as the one file of a form."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import Request
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from runtime import codings
from runtime.descriptions import FIELD, MULTIPART
from runtime.errors import BadInput, BodyTooLarge, CallerLeft, TooSlow, UnsupportedMediaType
from runtime.forms import FileField
from runtime.requests import Record
from runtime.service import service_of


async def read(request: Request, limit: int) -> bytes:
    """The whole body, inflated, and the time of its end in the record.

    Raises BodyTooLarge at `limit` bytes, before or after inflating; TooSlow, UnsupportedCoding, BadInput,
    CallerLeft; BodiesFull where those of all requests together take too much.
    """
    pieces: list[bytes] = []
    await _receive(request, limit, pieces.append)
    return b"".join(pieces)


async def read_file(request: Request, limit: int) -> bytes:
    """The raw body, or the file in the field `file` of a multipart form; raises as `read` does."""
    kind, parameters = _content_type(request.headers)
    if kind == MULTIPART:
        form = FileField(FIELD, parameters.get(b"boundary"))
        await _receive(request, limit, form.write)
        body = form.finish()
    elif kind.startswith("multipart/"):
        raise UnsupportedMediaType(f"the body is {kind}, expected an image or {MULTIPART}")
    else:
        body = await read(request, limit)
    if not body:
        raise BadInput("the body is empty, expected an image")
    return body


def media_type(headers: Headers) -> str:
    """Type and subtype in lower case, without parameters (RFC 9110, section 8.3.1)."""
    return _content_type(headers)[0]


def _content_type(headers: Headers) -> tuple[str, dict[bytes, bytes]]:
    given = headers.getlist("Content-Type")
    if len(given) > 1:
        raise BadInput(f"the request has {len(given)} Content-Type fields, expected one")
    kind, parameters = parse_options_header(given[0] if given else None)
    return kind.decode("latin-1").strip(), parameters


async def _receive(request: Request, limit: int, take: Callable[[bytes], None]) -> None:
    """Hands over the body's content piece by piece."""
    decoding = codings.decoding(request.headers)
    _check_declared(request.headers, limit)
    received = inflated = 0
    uploads = service_of(request).uploads
    record: Record = request.state.record
    async with _in_time(request):
        async for chunk in request.stream():
            received += len(chunk)
            for number, piece in enumerate(decoding.decode(chunk)):
                inflated += len(piece)
                if max(received, inflated) > limit:
                    raise BodyTooLarge(f"the body is over the limit of {limit} bytes")
                uploads.hold(record, len(piece))
                take(piece)
                if number:  # a little input may inflate to much: others get their turn
                    await asyncio.sleep(0)
        decoding.finish()


@asynccontextmanager
async def _in_time(request: Request) -> AsyncIterator[None]:
    limit_s = service_of(request).settings.body_timeout_s
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError:
        raise TooSlow(f"the body was not complete within {limit_s:g} s") from None
    except ClientDisconnect:
        raise CallerLeft("the caller closed the connection within the body") from None
    record: Record = request.state.record
    record.received_ns = time.monotonic_ns()


def _check_declared(headers: Headers, limit: int) -> None:
    declared = headers.get("Content-Length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge(f"the body of {declared} bytes is over the limit of {limit} bytes")
