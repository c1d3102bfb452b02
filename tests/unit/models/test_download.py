"""Downloads from a host that breaks off, forgets, changes and refuses as hosts do."""

import hashlib
import resource
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from models import download
from models.download import DownloadError

CONTENT = bytes(range(256)) * 20_000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
NAME = f"file-{SHA256[:8]}.pth"

Host = Any


@pytest.fixture
def host(download_host: Host) -> Host:
    """It has one file."""
    download_host.files[NAME] = CONTENT
    return download_host


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.pth"


def get(host: Host, path: Path, **options: Any) -> None:
    download.download(f"{host.url}/{NAME}", path, SHA256[:8], **options)


def ranges(host: Host) -> list[str | None]:
    """As they were asked for."""
    return [asked for _, asked in host.asked]


def left(path: Path) -> list[str]:
    return sorted(other.name for other in path.parent.iterdir())


def test_the_file_is_whole_and_progress_tells_its_bytes(host: Host, path: Path) -> None:
    told: list[tuple[int, int | None]] = []
    get(host, path, on_progress=lambda done, total: told.append((done, total)))
    assert path.read_bytes() == CONTENT
    assert left(path) == ["file.pth"]
    assert told[0] == (0, len(CONTENT))
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert len(told) > 3
    assert told == sorted(told)


def test_a_connection_that_breaks_is_taken_up_where_it_broke(host: Host, path: Path) -> None:
    host.breaks_after = [1000, 2_000_000]
    get(host, path)
    assert path.read_bytes() == CONTENT
    assert ranges(host) == [None, "bytes=1000-", "bytes=2001000-"]


def test_what_an_earlier_process_left_is_continued(host: Host, path: Path) -> None:
    path.with_name("file.pth.part").write_bytes(CONTENT[:12345])
    told: list[int] = []
    get(host, path, on_progress=lambda done, _total: told.append(done))
    assert path.read_bytes() == CONTENT
    assert ranges(host) == ["bytes=12345-"]
    assert told[0] == 12345


def test_what_came_before_ctrl_c_is_continued_too(host: Host, path: Path) -> None:
    def interrupt(done: int, _total: int | None) -> None:
        if done > 1_000_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(host, path, on_progress=interrupt)
    assert left(path) == ["file.pth.part"]
    come = path.with_name("file.pth.part").stat().st_size
    assert come > 1_000_000
    get(host, path)
    assert path.read_bytes() == CONTENT
    assert ranges(host) == [None, f"bytes={come}-"]
    assert left(path) == ["file.pth"]


def test_what_had_come_whole_is_not_asked_for_again(host: Host, path: Path) -> None:
    path.with_name("file.pth.part").write_bytes(CONTENT)
    get(host, path)
    assert path.read_bytes() == CONTENT
    assert left(path) == ["file.pth"]


def test_a_host_without_ranges_sends_it_anew(host: Host, path: Path) -> None:
    host.ranges = False
    path.with_name("file.pth.part").write_bytes(b"x" * 500)
    get(host, path)
    assert path.read_bytes() == CONTENT


def test_more_than_the_file_is_begun_anew(host: Host, path: Path) -> None:
    path.with_name("file.pth.part").write_bytes(bytes(len(CONTENT) + 1))
    get(host, path)
    assert path.read_bytes() == CONTENT


def test_a_part_of_something_else_is_found_by_the_hash_and_not_kept(host: Host, path: Path) -> None:
    path.with_name("file.pth.part").write_bytes(b"x" * 500)
    with pytest.raises(
        DownloadError, match=f"has sha256 .*, expected one that starts with {SHA256[:8]}"
    ):
        get(host, path)
    assert left(path) == []
    get(host, path)
    assert path.read_bytes() == CONTENT


def test_a_changed_file_is_refused(host: Host, path: Path) -> None:
    host.files[NAME] = CONTENT + b"!"
    with pytest.raises(DownloadError, match="could not be downloaded: what came has sha256"):
        get(host, path)
    assert left(path) == []


def test_a_refusal_keeps_what_was_there(host: Host, path: Path) -> None:
    path.with_name("file.pth.part").write_bytes(CONTENT[:700])
    host.statuses = [503]
    with pytest.raises(DownloadError, match="HTTP 503 Service Unavailable"):
        get(host, path)
    assert left(path) == ["file.pth.part"]
    get(host, path)
    assert path.read_bytes() == CONTENT
    assert ranges(host) == ["bytes=700-", "bytes=700-"]


def test_a_file_that_is_not_there_leaves_nothing(host: Host, path: Path) -> None:
    host.statuses = [404]
    with pytest.raises(DownloadError, match="could not be downloaded: HTTP 404 Not Found"):
        get(host, path)
    assert left(path) == []


def test_a_host_that_always_breaks_off_at_once_is_given_up(host: Host, path: Path) -> None:
    host.breaks_after = [0] * 10
    with pytest.raises(DownloadError, match=r"without sending complete message|disconnected"):
        get(host, path)
    assert len(host.asked) == 1
    assert left(path) == []


def test_a_host_that_does_not_listen(free_port: int, path: Path) -> None:
    with pytest.raises(DownloadError, match="could not be downloaded: Connection refused"):
        download.download(f"http://127.0.0.1:{free_port}/x", path, "")
    assert left(path) == []


def test_a_host_that_answers_nothing(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x"
        with pytest.raises(DownloadError, match="could not be downloaded: timed out"):
            download.download(url, path, "", stall_s=0.2)
    assert left(path) == []


def test_several_at_once_download_it_once(host: Host, path: Path) -> None:
    threads = [threading.Thread(target=get, args=(host, path)) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert path.read_bytes() == CONTENT
    assert ranges(host) == [None]
    assert left(path) == ["file.pth"]


def test_a_full_disk_is_an_os_error_and_leaves_nothing(host: Host, path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            get(host, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert caught.value.filename == f"{path}.part"
    assert left(path) == []
