"""Several containers behind a load balancer: the service is stateless, so any of them answers any request."""

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, Self

import httpx
import pytest

Docker = Callable[..., str]
Run = Callable[..., Any]

CALLERS: Final = 4
ANSWERS_BEFORE: Final = 20
ANSWERS_AFTER: Final = 20

NGINX: Final = """
user root;
daemon off;
pid {folder}/pid;
error_log {folder}/error.log;
worker_processes 1;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size 32m;
    upstream cicada {{
        least_conn;
        {servers}
    }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://cicada;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_connect_timeout 1s;
            # Only what did not reach a container goes to another one.
            proxy_next_upstream error timeout;
        }}
    }}
}}
"""


@contextmanager
def nginx(folder: Path, port: int, addresses: list[str]) -> Iterator[str]:
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        pytest.skip("no load balancer: there is no nginx (Debian: nginx)")
    servers = " ".join(
        f"server {address}:8080 max_fails=1 fail_timeout=30s;" for address in addresses
    )
    configuration = folder / "nginx.conf"
    configuration.write_text(NGINX.format(folder=folder, port=port, servers=servers))
    with subprocess.Popen(
        [program, "-c", str(configuration), "-e", str(folder / "error.log")]
    ) as process:
        try:
            wait_for(port)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    pytest.fail("the load balancer does not listen")


class Callers:
    """Ask one after another, each on its own connection, until told to stop."""

    def __init__(self, url: str, body: bytes) -> None:
        self._url = url
        self._body = body
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self.answered: list[tuple[float, httpx.Response]] = []
        """When each was asked, on the engine's clock, and its answer."""
        self._threads = [threading.Thread(target=self._ask) for _ in range(CALLERS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._stop.is_set():
                start = time.time()
                response = client.post(self._url, content=self._body)
                with self._changed:
                    self.answered.append((start, response))
                    self._changed.notify_all()

    def wait_for_more(self, count: int) -> None:
        with self._changed:
            wanted = len(self.answered) + count
            assert self._changed.wait_for(lambda: len(self.answered) >= wanted, timeout=120)


def test_of_two_containers_one_dies_under_load_and_only_what_it_had_is_lost(
    run: Run, docker: Docker, function: str, photo: Path, tmp_path: Path, free_port: int
) -> None:
    first, second = run(image=function), run(image=function)
    for container in (first, second):
        container.wait_until_ready()
    tmp_path.chmod(0o755)
    with (
        nginx(tmp_path, free_port, [first.address, second.address]) as url,
        Callers(f"{url}/predictions/flowers", photo.read_bytes()) as callers,
    ):
        callers.wait_for_more(ANSWERS_BEFORE)
        assert all(c.metric("cicada_requests_total") > 0 for c in (first, second))
        docker("kill", first.id)
        callers.wait_for_more(ANSWERS_AFTER)
    lost = [(start, response) for start, response in callers.answered if not response.is_success]
    # Those under way when it died, of which each caller had one.
    ended = first.finished_s
    assert all(start < ended for start, _ in lost)
    assert len(lost) <= CALLERS
    assert {response.status_code for _, response in lost} <= {502}
    right = [response for _, response in callers.answered if response.is_success]
    assert len({response.text for response in right}) == 1
    assert len({response.headers["Cicada-Version"] for response in right}) == 1


def test_a_request_is_answered_alike_by_any_container_and_leaves_nothing_in_it(
    run: Run, docker: Docker, function: str, photo: Path
) -> None:
    containers = [run(image=function), run(image=function)]
    for container in containers:
        container.wait_until_ready()
    before = [docker("diff", container.id) for container in containers]
    texts = {container.predict(photo, "flowers").text for container in containers for _ in range(2)}
    assert len(texts) == 1
    assert [docker("diff", container.id) for container in containers] == before
