"""Request bodies: read up to the limit, raw or as one file of a multipart form."""

import time
from collections.abc import AsyncGenerator

from fastapi import Request
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from runtime.descriptions import FIELD, MULTIPART
from runtime.errors import BadInput, BodyTooLarge, CallerLeft, UnsupportedMediaType
from runtime.requests import Record


async def read(request: Request, limit: int) -> bytes:
    """The whole body, and the time of its end in the record; raises BodyTooLarge at `limit` bytes."""
    _check_encoding(request.headers)
    _check_declared(request.headers, limit)
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise BodyTooLarge(f"the body is over the limit of {limit} bytes")
    except ClientDisconnect:
        raise CallerLeft("the caller closed the connection within the body") from None
    record: Record = request.state.record
    record.received_ns = time.monotonic_ns()
    return bytes(body)


async def read_file(request: Request, limit: int) -> bytes:
    """The raw body, or the field `file` of a multipart form."""
    body = await read(request, limit)
    if media_type(request.headers) == MULTIPART:
        body = await _file_field(request.headers, body)
    if not body:
        raise BadInput("the body is empty, expected an image")
    return body


def media_type(headers: Headers) -> str:
    return headers.get("Content-Type", "").partition(";")[0].strip().lower()


def _check_encoding(headers: Headers) -> None:
    encoding = headers.get("Content-Encoding", "identity").strip().lower()
    if encoding != "identity":
        raise UnsupportedMediaType("the body has a Content-Encoding, expected it unencoded")


def _check_declared(headers: Headers, limit: int) -> None:
    declared = headers.get("Content-Length", "0")
    if declared.isdecimal() and int(declared) > limit:
        raise BodyTooLarge(f"the body of {declared} bytes is over the limit of {limit} bytes")


class _InMemory(MultiPartParser):
    """The body is in memory already, and its size bounded: nothing is gained by files on disk."""

    spool_max_size = 1 << 62


async def _file_field(headers: Headers, body: bytes) -> bytes:
    try:
        form = await _InMemory(headers, _once(body), max_files=1, max_fields=16).parse()
    except MultiPartException as error:
        raise BadInput(f"the multipart form cannot be read: {error.message}") from None
    try:
        field = form.get(FIELD)
        if not isinstance(field, UploadFile):
            raise BadInput(f"the multipart form has no file in a field named {FIELD!r}")
        return await field.read()
    finally:
        await form.close()


async def _once(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
