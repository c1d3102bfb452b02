"""Prometheus reads our metrics, and every question of the dashboard has an answer in them.

Prometheus and its promtool are Debian's: the images that the compose file names cannot be had everywhere.
"""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
import yaml

Run = Callable[..., Any]

DEADLINE_S: Final = 60
MEANS_NOTHING_HAPPENED: Final = {"Handlers replaced", "Errors"}
VARIABLES: Final = {"$__rate_interval": "15s", "$model": ".*", "$strategy": ".*"}


def program(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} (Debian: prometheus)")
    return found


def test_the_configuration_is_what_prometheus_understands(repository: Path) -> None:
    file = repository / "docker" / "prometheus" / "prometheus.yml"
    done = subprocess.run(
        [program("promtool"), "check", "config", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def prometheus(repository: Path, folder: Path, port: int, target: str) -> Iterator[str]:
    """Prometheus with our configuration; the engine's name server, which only containers can ask, is left out."""
    configuration = yaml.safe_load((repository / "docker/prometheus/prometheus.yml").read_text())
    (job,) = configuration["scrape_configs"]
    del job["dns_sd_configs"]
    job["static_configs"] = [{"targets": [target]}]
    configuration["global"]["scrape_interval"] = "1s"
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    command = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + DEADLINE_S
            # It listens, and answers 503, before it has opened its database.
            while not is_ready(url):
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.1)
            yield url
        finally:
            process.terminate()


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").is_success
    except httpx.TransportError:
        return False


def asked(expression: str) -> str:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def test_every_panel_of_the_dashboard_shows_something(
    run: Run, function: str, photo: Path, repository: Path, tmp_path: Path, free_port: int
) -> None:
    container = run(image=function)
    container.wait_until_ready()
    dashboard = json.loads((repository / "docker/grafana/dashboards/cicada.json").read_text())
    expressions = {
        (panel["title"], asked(target["expr"]))
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }
    assert expressions
    with (
        prometheus(repository, tmp_path, free_port, f"{container.address}:8080") as url,
        httpx.Client(base_url=url, timeout=10) as client,
    ):
        missing = {each for each in expressions if each[0] not in MEANS_NOTHING_HAPPENED}
        deadline = time.monotonic() + DEADLINE_S
        while missing:
            assert time.monotonic() < deadline, missing
            assert container.predict(photo, "flowers").status_code == 200
            missing = {(title, query) for title, query in missing if not has_values(client, query)}
        for _, query in expressions:
            assert answer(client, query)["status"] == "success"
        listed = client.get("/api/v1/label/model/values").json()["data"]
    assert listed == ["flowers"]


def answer(client: httpx.Client, query: str) -> dict[str, Any]:
    return dict(client.get("/api/v1/query", params={"query": query}).json())


def has_values(client: httpx.Client, query: str) -> bool:
    found = answer(client, query)
    return found["status"] == "success" and any(
        row["value"][1] != "NaN" for row in found["data"]["result"]
    )


def test_the_dashboard_asks_for_no_metric_that_there_is_not(
    run: Run, function: str, photo: Path, repository: Path
) -> None:
    container = run(image=function)
    container.wait_until_ready()
    assert container.predict(photo, "flowers").status_code == 200
    served = set(re.findall(r"^# TYPE (cicada_\w+)", container.get("/metrics").text, re.MULTILINE))
    served |= {f"{name}_{part}" for name in served for part in ("bucket", "sum", "count")}
    text = (repository / "docker/grafana/dashboards/cicada.json").read_text()
    # The time series of a counter that has not counted yet is named by its type line all the same.
    assert set(re.findall(r"\bcicada_\w+", text)) <= served
