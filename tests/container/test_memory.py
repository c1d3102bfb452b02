"""Memory limits: weights larger than they are, requests larger than they are, and the kernel's own end of them."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import page_cache

Run = Callable[..., Any]

GIB = 1 << 30
ONE_GIB = ("--memory", "1g", "--memory-swap", "1g")
HOG = "held = []\nwhile True: held.append(b'x' * (16 << 20))"
CACHED = """
import pathlib
for name in ("memory/memory.stat", "memory.stat"):
    file = pathlib.Path("/sys/fs/cgroup", name)
    if file.is_file():
        rows = dict(line.split() for line in file.read_text().splitlines())
        print(rows.get("total_cache") or rows["file"])
        break
"""


@pytest.mark.parametrize("model", ["vgg16", "vit_l_16"])
def test_weights_may_be_larger_than_the_memory(
    run: Run, weights: Any, photo: Path, model: str
) -> None:
    mounted = weights.with_models("vgg16", "vit_l_16")
    size = sum(file.stat().st_size for file in weights.files(model))
    assert size > {"vgg16": GIB // 2, "vit_l_16": GIB}[model]
    large, small = run(*mounted), run(*mounted, *ONE_GIB)
    large.wait_until_ready()
    small.wait_until_ready()
    assert small.metric("cicada_memory_limit_bytes") == GIB
    expected = large.predict(photo, model)
    for strategy in ("cicada", "mini"):
        for _ in range(2):
            answer = small.predict(photo, model, **{"Cicada-Strategy": strategy})
            assert (answer.status_code, answer.json()) == (200, expected.json())
    assert not small.events("handler ended")
    assert small.state["OOMKilled"] is False


def test_what_really_cannot_fit_is_refused_with_a_reason(
    run: Run, weights: Any, photo: Path
) -> None:
    """A full-precision copy of 1.2 GB of weights, and the activations of 48 images at once."""
    container = run(*weights.with_models("vgg16", "vit_l_16"), *ONE_GIB)
    container.wait_until_ready()
    copied = container.predict(photo, "vit_l_16", **{"Cicada-Strategy": "traditional"})
    images = bytes(48 * 3 * 224 * 224 * 4)
    described = (
        '{"inputs": [{"name": "input", "datatype": "FP32", "shape": [48, 3, 224, 224], '
        f'"parameters": {{"binary_data_size": {len(images)}}}}}]}}'
    ).encode()
    many = container.client.post(
        "/v2/models/vgg16/infer",
        content=described + images,
        headers={"Inference-Header-Content-Length": str(len(described))},
    )
    for answer in (copied, many):
        assert answer.status_code == 503
        assert int(answer.headers["Retry-After"]) > 0
        assert "MiB of memory" in answer.json()["error"]
    assert container.predict(photo, "vgg16").status_code == 200
    assert not container.events("handler ended")
    assert container.state["OOMKilled"] is False


def test_a_handler_that_the_kernel_kills_is_replaced_and_the_service_lives_on(
    run: Run, weights: Any, photo: Path
) -> None:
    container = run(*weights.with_models("resnet50"), *ONE_GIB)
    container.wait_until_ready()
    expected = container.predict(photo, "resnet50").json()
    container.execute("python", "-c", HOG, check=False)  # takes all until it is killed itself
    container.wait_until(lambda: container.events("handler ended"))
    assert {event["cause"] for event in container.events("handler ended")} == {"oom"}
    container.wait_until_ready()
    answer = container.predict(photo, "resnet50")
    assert (answer.status_code, answer.json()) == (200, expected)
    assert container.inspect()["RestartCount"] == 0
    assert container.metric("cicada_handler_restarts_total") >= 1


def test_killed_as_a_whole_it_is_started_again_and_serves_the_same(
    run: Run, weights: Any, photo: Path
) -> None:
    """As where the kernel ends all of a container's processes when one takes too much memory."""
    container = run(*weights.with_models("resnet50"), *ONE_GIB, "--restart", "on-failure")
    container.wait_until_ready()
    expected = container.predict(photo, "resnet50").json()
    os.kill(container.state["Pid"], signal.SIGKILL)
    container.wait_until(lambda: started_again(container))
    container.serves_at()
    container.wait_until_ready()
    answer = container.predict(photo, "resnet50")
    assert (answer.status_code, answer.json()) == (200, expected)


def started_again(container: Any) -> bool:
    described = container.inspect()
    return described["RestartCount"] == 1 and not described["State"]["Restarting"]


def test_containers_that_share_a_volume_hold_one_copy_of_the_weights(
    run: Run, weights: Any, photo: Path
) -> None:
    """The kernel charges a file's page to the container that brought it in, and to no other."""
    mounted = weights.with_models("vgg16")
    files = weights.files("vgg16")
    size = sum(file.stat().st_size for file in files)
    containers = [run(*mounted), run(*mounted)]
    for container in containers:
        container.wait_until_ready()
    page_cache.evict({file.parent for file in files})
    grown = []
    for container in containers:
        before = int(container.execute("python", "-c", CACHED))
        answer = container.predict(photo, "vgg16")
        assert answer.status_code == 200
        grown.append(int(container.execute("python", "-c", CACHED)) - before)
    first, second = grown
    assert first > 0.98 * size
    assert second < 0.02 * size
