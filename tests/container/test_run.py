"""The options that containers are run with: little of them is left, and it serves all the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Docker = Callable[..., str]
Run = Callable[..., Any]


def test_nothing_but_the_weights_is_needed(
    run: Run, weights: Any, hardened: tuple[str, ...], photo: Path
) -> None:
    """No network, no capability, nothing writable but /tmp, a user that the image does not know, tiny shared memory."""
    container = run(
        *hardened,
        "--user", "23456:0",
        "--network", "none",
        "--shm-size", "64k",
        "--volume", f"{photo}:/photo.jpg:ro",
        *weights.with_models("resnet50"),
        port=None,
    )  # fmt: skip
    container.wait_until(lambda: container.events("handler ready"))
    labels = container.execute("cicada", "invoke", "/photo.jpg", "--model", "resnet50")
    assert "pipeline" in labels
    (request,) = container.events("request")
    assert request["status"] == 200
    assert not [line for line in container.log.splitlines() if not line.startswith("{")]


def test_the_port_is_the_one_that_port_names(run: Run, weights: Any) -> None:
    container = run(*weights.with_models("resnet50"), "--env", "PORT=9099", port=9099)
    container.wait_until_ready()
    assert container.execute("cicada", "health") == ""


def test_with_an_empty_store_it_is_live_and_says_what_is_missing(run: Run) -> None:
    container = run()
    container.wait_until(lambda: container.answers("/v2/health/live"))
    container.wait_until(lambda: container.events("handler ready"))
    answer = container.get("/v2/health/ready")
    assert (answer.status_code, answer.json()["error"]) == (
        503,
        "no model is prepared; `cicada prepare` does that",
    )
    assert "no model is prepared" in container.execute("cicada", "health", check=False)


def test_the_engine_is_told_that_it_is_healthy(run: Run, weights: Any) -> None:
    container = run(*weights.with_models("resnet50"), "--health-interval", "1s")
    container.wait_until(lambda: container.state["Health"]["Status"] == "healthy")


@pytest.mark.parametrize(
    "limit", [("--cpus", "1"), ("--cpus", "0.5"), ("--cpuset-cpus", "0")], ids=" ".join
)
def test_a_container_of_one_core_or_less_computes_on_one_thread(
    run: Run, weights: Any, photo: Path, limit: tuple[str, str]
) -> None:
    container = run(*limit, *weights.with_models("resnet50"))
    container.wait_until_ready()
    (ready,) = container.events("handler ready")
    assert ready["threads"] == 1
    assert container.metric("cicada_cpu_limit_cores") == (0.5 if "0.5" in limit else 1)
    assert container.predict(photo, "resnet50").status_code == 200


def test_without_a_limit_it_computes_on_every_core(run: Run, weights: Any, docker: Docker) -> None:
    container = run(*weights.with_models("resnet50"))
    container.wait_until_ready()
    (ready,) = container.events("handler ready")
    assert ready["threads"] == int(docker("info", "--format", "{{.NCPU}}"))


def test_models_are_prepared_beside_a_running_service(
    run: Run, docker: Docker, image: str, tag: str, photo: Path
) -> None:
    volume = f"{tag}-growing"
    try:
        container = run("--volume", f"{volume}:/weights:ro")
        container.wait_until(lambda: container.answers("/v2/health/live"))
        docker(
            "run",
            "--rm",
            "--volume",
            f"{volume}:/weights",
            image,
            "prepare",
            "resnet18",
            "--random",
            "0",
        )
        container.wait_until_ready()
        assert container.predict(photo, "resnet18").status_code == 200
    finally:
        docker("rm", "--force", container.id)
        docker("volume", "rm", "--force", volume)
