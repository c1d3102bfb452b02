"""What unit tests share: a stand-in for the host that weights are downloaded from, and imports undone."""

import io
import re
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import BinaryIO

import pytest


@dataclass(slots=True)
class DownloadHost:
    """Files by name, and how the host behaves about them: it breaks off, forgets and refuses as hosts do."""

    url: str
    files: dict[str, bytes | Path] = field(default_factory=dict)
    ranges: bool = True
    breaks_after: list[int] = field(default_factory=list)
    """For each answer in turn: after how many bytes the connection breaks."""
    statuses: list[int] = field(default_factory=list)
    """For each request in turn: with what it is refused."""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Each request's file and its Range."""

    def open(self, name: str) -> BinaryIO:
        content = self.files[name]
        return content.open("rb") if isinstance(content, Path) else io.BytesIO(content)


def answering(host: DownloadHost) -> type[BaseHTTPRequestHandler]:
    class Answering(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            asked = self.headers["Range"]
            host.asked.append((name, asked))
            if host.statuses:
                self.send_error(host.statuses.pop(0))
            elif name not in host.files:
                self.send_error(404)
            else:
                with host.open(name) as content:
                    self.send(content, asked if host.ranges else None)
            self.close_connection = True

        def send(self, content: BinaryIO, asked: str | None) -> None:
            total = content.seek(0, io.SEEK_END)
            start = int(re.findall(r"\d+", asked)[0]) if asked else 0
            if start >= total:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{total}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            self.send_header("Content-Length", str(total - start))
            self.end_headers()
            left = host.breaks_after.pop(0) if host.breaks_after else total - start
            content.seek(start)
            while left and (chunk := content.read(min(left, 1 << 20))):
                self.wfile.write(chunk)
                left -= len(chunk)

        def log_message(self, *_arguments: object) -> None:
            pass

    return Answering


@pytest.fixture
def download_host() -> Iterator[DownloadHost]:
    """On this machine, without files at first."""
    host = DownloadHost("")
    with ThreadingHTTPServer(("127.0.0.1", 0), answering(host)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        host.url = f"http://127.0.0.1:{server.server_port}"
        yield host
        server.shutdown()
        thread.join(10)


@pytest.fixture
def imports_are_undone(tmp_path: Path) -> Iterator[None]:
    """A user's module is one per process and file; the next test's has the same name and other contents.

    What torch imports meanwhile stays: not all of it can be imported twice.
    """
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}/"):
            del sys.modules[name]
