"""A file from a host: continued where an earlier try ended, its hash checked, whole or not there."""

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import httpx

from models.errors import ModelError

OnProgress = Callable[[int, int | None], None]
"""Told the bytes that are there, and how many there will be if the host says so."""

STALL_S: Final = 30.0
"""How long a host may send nothing."""

_CHUNK_BYTES: Final = 1 << 20
_OK, _PARTIAL, _BEYOND_ITS_END = 200, 206, 416


class DownloadError(ModelError):
    """A file that could not be downloaded."""


def download(
    url: str,
    path: Path,
    sha256_start: str,
    on_progress: OnProgress = lambda _done, _total: None,
    stall_s: float = STALL_S,
) -> None:
    """Downloads to `path`, unless it is there when its turn comes; one process at a time.

    What has come when it is interrupted stays beside as `.part`, and is continued by the next try. The
    file appears only if its sha256 starts as given. Raises DownloadError; OSError when it cannot be written.
    """
    part = path.with_name(f"{path.name}.part")
    with _alone(part) as file:
        try:
            if not path.exists():
                _receive(url, file, on_progress, stall_s)
                _check(file, sha256_start)
                os.fsync(file.fileno())
                part.replace(path)
        except DownloadError as error:
            raise DownloadError(f"{url} could not be downloaded: {error}") from error
        except OSError as error:
            error.filename = error.filename or str(part)
            file.truncate(0)  # a full disk is not kept full
            raise
        finally:
            if part.exists() and not part.stat().st_size:
                part.unlink()


@contextmanager
def _alone(part: Path) -> Iterator[BinaryIO]:
    """The file, locked; waits for a process that holds it."""
    while True:
        with part.open("a+b", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, part):  # who held it has finished or given up
                continue
            yield file
            return


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _receive(url: str, file: BinaryIO, on_progress: OnProgress, stall_s: float) -> None:
    """Tries again, from where it ended, as long as each try brings something."""
    with httpx.Client(follow_redirects=True, timeout=stall_s) as client:
        while True:
            before = _size(file)
            try:
                _receive_rest(client, url, file, on_progress)
            except httpx.TransportError as error:
                if _size(file) <= before:
                    raise DownloadError(_reason(error)) from error
            except httpx.HTTPError as error:
                raise DownloadError(_reason(error)) from error
            else:
                return


def _receive_rest(client: httpx.Client, url: str, file: BinaryIO, on_progress: OnProgress) -> None:
    there = _size(file)
    headers = {"Accept-Encoding": "identity"}
    if there:
        headers["Range"] = f"bytes={there}-"
    with client.stream("GET", url, headers=headers) as answer:
        if answer.status_code == _BEYOND_ITS_END and _total(answer) == there:
            return  # all of it had come
        if answer.status_code == _OK:
            file.truncate(0)
            _append(answer, file, on_progress)
            return
        if answer.status_code == _PARTIAL and _starts_at(answer, there):
            _append(answer, file, on_progress)
            return
        if not there or answer.status_code not in {_PARTIAL, _BEYOND_ITS_END}:
            raise DownloadError(f"HTTP {answer.status_code} {answer.reason_phrase}")
    file.truncate(0)  # what is there is of another file
    _receive_rest(client, url, file, on_progress)


def _append(answer: httpx.Response, file: BinaryIO, on_progress: OnProgress) -> None:
    there = _size(file)
    expected = _expected(answer, there)
    on_progress(there, expected)
    for chunk in answer.iter_raw():  # as it comes: larger pieces would be lost when it breaks off
        _write(file, chunk)
        there += len(chunk)
        on_progress(there, expected)


def _write(file: BinaryIO, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[file.write(view) :]


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _starts_at(answer: httpx.Response, place: int) -> bool:
    return re.match(rf"bytes {place}-", answer.headers.get("Content-Range", "")) is not None


def _total(answer: httpx.Response) -> int | None:
    found = re.search(r"/(\d+)$", answer.headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _expected(answer: httpx.Response, there: int) -> int | None:
    length: str = answer.headers.get("Content-Length", "")
    return there + int(length) if length.isdecimal() else None


def _check(file: BinaryIO, sha256_start: str) -> None:
    file.seek(0)
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK_BYTES):
        digest.update(chunk)
    found = digest.hexdigest()
    if not found.startswith(sha256_start):
        file.truncate(0)
        raise DownloadError(
            f"what came has sha256 {found}, expected one that starts with {sha256_start}"
        )


def _reason(error: httpx.HTTPError) -> str:
    """In the system's words where it is the system's error: httpx keeps it as the cause."""
    return re.sub(r"^\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
