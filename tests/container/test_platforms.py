"""Each platform's container contract: what it calls, in its order, with its headers and signals.

The containers run as the manifests in docker/ say: their settings, limits, users and probes are read from there.
"""

import json
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

Docker = Callable[..., str]
Run = Callable[..., Any]
Build = Callable[..., str]

JPEG: Final = {"Content-Type": "image/jpeg"}
KUBELET: Final = {"User-Agent": "kube-probe/1.34", "Accept": "*/*", "Connection": "close"}
PORT: Final = 8099
"""Where a platform says which; 8080 would be listened on anyway."""
AT_ONCE: Final = 2
TAKEN: Final = ("cicada_queue_depth", "cicada_in_flight", "cicada_requests_total")
TRACE: Final = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture(scope="session")
def manifest(repository: Path) -> Callable[..., dict[str, Any]]:
    """A file of docker/, YAML or JSON."""

    def read(name: str) -> dict[str, Any]:
        return dict(yaml.safe_load((repository / "docker" / name).read_text()))

    return read


def pod_options(pod: dict[str, Any], container: dict[str, Any]) -> list[str]:
    """What a kubelet makes of a container of a pod, in the engine's options."""
    options = limited(container["resources"]["limits"])
    options += given({variable["name"]: variable["value"] for variable in container["env"]})
    security = container.get("securityContext", {})
    if security.get("readOnlyRootFilesystem"):
        options += ["--read-only"]
    if security.get("allowPrivilegeEscalation") is False:
        options += ["--security-opt", "no-new-privileges"]
    for capability in security.get("capabilities", {}).get("drop", []):
        options += ["--cap-drop", capability]
    empty = {volume["name"] for volume in pod.get("volumes", []) if "emptyDir" in volume}
    for mount in container.get("volumeMounts", []):
        assert mount["name"] in empty
        options += ["--tmpfs", mount["mountPath"]]
    return options


def limited(limits: Mapping[str, str]) -> list[str]:
    """Kubernetes' quantities as the engine's options."""
    cpu = limits["cpu"]
    cores = float(cpu.removesuffix("m")) / (1000 if cpu.endswith("m") else 1)
    return ["--memory", limits["memory"].replace("Gi", "g"), "--cpus", str(cores)]


def given(environment: Mapping[str, str]) -> list[str]:
    """Variables as the engine's options."""
    return [part for name, value in environment.items() for part in ("--env", f"{name}={value}")]


def told_to_end(container: Any, docker: Docker) -> None:
    docker("kill", "--signal", "TERM", container.id)


def told_to_end_at_work(
    container: Any, docker: Docker, path: str, body: bytes, headers: Mapping[str, str]
) -> None:
    """SIGTERM while one request is at work and one waits; both were taken and must be answered."""
    before = container.metric("cicada_requests_total")
    slow = {"Cicada-Strategy": "traditional", **headers}
    with ThreadPoolExecutor(AT_ONCE) as callers:
        asked = [
            callers.submit(container.client.post, path, content=body, headers=slow)
            for _ in range(AT_ONCE)
        ]
        container.wait_until(lambda: container.metric(*TAKEN) >= before + AT_ONCE)
        told_to_end(container, docker)
    refused = [each.result().text for each in asked if each.result().status_code != 200]
    assert not refused


def ends_in_time(container: Any, docker: Docker, grace_s: float) -> None:
    docker("wait", container.id)
    assert container.finished_s - container.signalled_s < grace_s
    assert container.state["ExitCode"] == 0


def probed(
    container: Any, spec: Mapping[str, Any], *probes: str, headers: Mapping[str, str] = KUBELET
) -> None:
    """As the kubelet does, one probe after another, each until it succeeds."""
    for probe in probes:
        path = spec[probe]["httpGet"]["path"]
        container.wait_until(lambda path=path: container.answers(path, **headers))


def test_knative(run: Run, docker: Docker, function: str, photo: Path, manifest: Any) -> None:
    """Runtime contract: PORT; the queue proxy probes and forwards, one request at a time; SIGTERM to scale down."""
    pod = manifest("knative.yaml")["spec"]["template"]["spec"]
    (spec,) = pod["containers"]
    revision = {
        "K_SERVICE": "flowers",
        "K_CONFIGURATION": "flowers",
        "K_REVISION": "flowers-00001",
        "PORT": str(PORT),
    }
    container = run(
        *pod_options(pod, spec),
        *given(revision),
        "--user", "1000650000:0",
        image=function,
        port=PORT,
    )  # fmt: skip
    probe = KUBELET | {"K-Kubelet-Probe": "queue", "K-Network-Probe": "queue"}
    probed(container, spec, "livenessProbe", "readinessProbe", headers=probe)
    assert int(container.metric("cicada_handlers_alive")) == pod["containerConcurrency"]
    forwarded = {
        "K-Proxy-Request": "activator",
        "Forwarded": "for=10.0.0.1;proto=http",
        "X-Forwarded-For": "10.0.0.1, 10.0.0.2",
        "X-Forwarded-Proto": "http",
        "X-Request-Id": "8b2ce0a8-5c0f-4bd4-9a0d-3a5bd21b9a0e",
    }
    answer = container.predict(photo, "flowers", **forwarded)
    assert answer.status_code == 200
    assert answer.headers["X-Request-Id"] == forwarded["X-Request-Id"]
    told_to_end_at_work(
        container, docker, "/predictions/flowers", photo.read_bytes(), JPEG | forwarded
    )
    ends_in_time(container, docker, pod["timeoutSeconds"])


def test_cloud_run(run: Run, docker: Docker, function: str, photo: Path, manifest: Any) -> None:
    """Container contract: listens on 0.0.0.0 at the PORT it is given; SIGTERM, and ten seconds until SIGKILL."""
    pod = manifest("cloud-run.yaml")["spec"]["template"]["spec"]
    (spec,) = pod["containers"]
    revision = {
        "PORT": str(PORT),
        "K_SERVICE": "flowers",
        "K_CONFIGURATION": "flowers",
        "K_REVISION": "flowers-00001-abc",
    }
    container = run(
        *pod_options(pod, spec),
        *given(revision),
        image=function,
        port=PORT,
    )
    startup = spec["startupProbe"]
    allowed_s = startup["periodSeconds"] * startup["failureThreshold"]
    container.wait_until(lambda: container.answers(startup["httpGet"]["path"]))
    assert time.time() - container.started_s < allowed_s
    assert container.answers(spec["livenessProbe"]["httpGet"]["path"])
    headers = {
        "X-Cloud-Trace-Context": "105445aa7843bc8bf206b12000100000/1;o=1",
        "traceparent": TRACE,
        "X-Forwarded-For": "203.0.113.7",
        "X-Forwarded-Proto": "https",
        "Forwarded": 'for="203.0.113.7";proto=https',
    }
    assert container.predict(photo, "flowers", **headers).status_code == 200
    told_to_end_at_work(container, docker, "/invocations", photo.read_bytes(), JPEG | headers)
    ends_in_time(container, docker, 10)


def test_kubernetes(run: Run, docker: Docker, function: str, photo: Path, manifest: Any) -> None:
    """The kubelet's probes in their order; preStop, during which requests still come; SIGTERM."""
    template = manifest("kubernetes/deployment.yaml")["spec"]["template"]
    pod = template["spec"]
    (spec,) = pod["containers"]
    container = run(*pod_options(pod, spec), "--user", "23456:0", image=function)
    probed(container, spec, "startupProbe", "readinessProbe", "livenessProbe")
    scraped = template["metadata"]["annotations"]["prometheus.io/path"]
    assert "cicada_queue_depth 0.0" in container.get(scraped).text
    with ThreadPoolExecutor() as node:
        leaving = node.submit(container.execute, *spec["lifecycle"]["preStop"]["exec"]["command"])
        assert container.predict(photo, "flowers").status_code == 200
        leaving.result()
    told_to_end_at_work(container, docker, "/predictions/flowers", photo.read_bytes(), JPEG)
    ends_in_time(container, docker, pod["terminationGracePeriodSeconds"])


def test_kserve(run: Run, docker: Docker, weights: Any, manifest: Any) -> None:
    """The v2 protocol on a store mounted where KServe mounts it: metadata, readiness per model, infer; SIGTERM."""
    runtime = manifest("kserve/runtime.yaml")["spec"]
    (spec,) = runtime["containers"]
    container = run(
        *pod_options(runtime, spec),
        "--user", "1000650000:0",
        *weights.with_models("resnet50", at="/mnt/models"),
        command=spec["args"],
    )  # fmt: skip
    probed(container, spec, "livenessProbe", "readinessProbe")
    assert container.get("/v2/models/resnet50/ready").json()["ready"] is True
    described = container.get("/v2/models/resnet50").json()
    (tensor,) = described["inputs"]
    values = [0.5] * (3 * 224 * 224)
    body = {
        "id": "42",
        "inputs": [
            {"name": tensor["name"], "datatype": "FP32", "shape": [1, 3, 224, 224], "data": values}
        ],
        "outputs": [{"name": "probabilities"}],
    }
    gateway = {"X-Request-Id": "42", "X-Forwarded-For": "10.0.0.1", "X-Envoy-Attempt-Count": "1"}
    infer = "/v2/models/resnet50/infer"
    answer = container.client.post(infer, json=body, headers=gateway)
    assert answer.status_code == 200
    (probabilities,) = answer.json()["outputs"]
    assert probabilities["shape"] == [1, 1000]
    assert abs(sum(probabilities["data"]) - 1) < 1e-3
    assert answer.json()["id"] == "42"
    told_to_end_at_work(
        container, docker, infer, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    ends_in_time(container, docker, 30)


def test_lambda(
    run: Run,
    docker: Docker,
    build: Build,
    function: str,
    photo: Path,
    repository: Path,
    manifest: Any,
    tmp_path: Path,
) -> None:
    """Read-only, a user of no group that we know, no /dev/shm, frozen between invocations; in the end SIGTERM, and 2 s.

    The adapter itself is AWS's; what it asks of the service is asked here: readiness every 10 ms, then one
    request after another with the invocation's context in headers.
    """
    settings = manifest("lambda/function.json")
    image = build(
        "lambda",
        "--build-arg", f"IMAGE={function}",
        "--build-arg", f"ADAPTER={stand_in_adapter(build, tmp_path)}",
        str(repository / "docker" / "lambda"),
    )  # fmt: skip
    container = run(
        "--read-only",
        "--tmpfs", "/tmp",
        "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges",
        "--user", "993:990",
        "--ipc", "none",
        "--memory", f"{settings['MemorySize']}m",
        *given(settings["Environment"]["Variables"]),
        image=image,
    )  # fmt: skip
    environment = dict(each.partition("=")[::2] for each in container.inspect()["Config"]["Env"])
    assert environment["AWS_LWA_PORT"] == environment["PORT"]
    readiness = environment["AWS_LWA_READINESS_CHECK_PATH"]
    healthy = int(environment["AWS_LWA_READINESS_CHECK_HEALTHY_STATUS"])
    assert container.execute("ls", "/opt/extensions").split() == ["lambda-adapter"]
    container.wait_until(lambda: container.answers(readiness))
    assert container.get(readiness).status_code == healthy
    context = {
        "x-amzn-request-context": json.dumps({"http": {"method": "POST", "path": "/invocations"}}),
        "x-amzn-lambda-context": json.dumps({"request_id": "8476a536", "deadline": 1542409706888}),
        "x-amzn-trace-id": "Root=1-5bef4de7-ad49b0e87f6ef6c87fc2e700;Parent=9a9197af755a6419;Sampled=1",
    }
    for _ in range(3):
        answer = container.client.post(
            "/invocations", content=photo.read_bytes(), headers={**JPEG, **context}
        )
        assert answer.status_code == 200
        docker("pause", container.id)
        docker("unpause", container.id)
    assert not container.events("handler ended")
    told_to_end(container, docker)
    ends_in_time(container, docker, 2)


def stand_in_adapter(build: Build, folder: Path) -> str:
    """An image with a file where the adapter's image has its program."""
    (folder / "lambda-adapter").write_text("#!/bin/sh\n")
    (folder / "Dockerfile").write_text("FROM scratch\nCOPY lambda-adapter /lambda-adapter\n")
    return build("adapter", str(folder))


def test_sagemaker(run: Run, docker: Docker, function: str, photo: Path, manifest: Any) -> None:
    """`docker run IMAGE serve`; GET /ping within two seconds; POST /invocations; SIGTERM, and 30 s until SIGKILL."""
    model = manifest("sagemaker/model.json")["PrimaryContainer"]
    (variant,) = manifest("sagemaker/endpoint-config.json")["ProductionVariants"]
    container = run(
        "--memory", f"{variant['ServerlessConfig']['MemorySizeInMB']}m",
        *given(model["Environment"]),
        image=function,
        command=["serve"],
    )  # fmt: skip
    container.wait_until(lambda: container.answers("/ping"))
    assert container.client.get("/ping", timeout=2).status_code == 200
    headers = {
        **JPEG,
        "Accept": "application/json",
        "X-Amzn-SageMaker-Custom-Attributes": "trace=1",
    }
    with ThreadPoolExecutor() as callers:
        asked = callers.submit(
            container.client.post, "/invocations", content=photo.read_bytes(), headers=headers
        )
        assert container.client.get("/ping", timeout=2).status_code == 200  # also while it works
    assert asked.result().status_code == 200
    assert len(asked.result().json()) == 5
    told_to_end_at_work(container, docker, "/invocations", photo.read_bytes(), headers)
    ends_in_time(container, docker, 30)


def test_sagemaker_with_weights_of_its_own(run: Run, weights: Any, photo: Path) -> None:
    """What `model.tar.gz` held lies at /opt/ml/model, read-only."""
    container = run(
        *weights.with_models("resnet50", at="/opt/ml/model"),
        *given({"CICADA_WEIGHTS": "/opt/ml/model", "CICADA_DEFAULT_MODEL": "resnet50"}),
        command=["serve"],
    )
    container.wait_until(lambda: container.answers("/ping"))
    answer = container.client.post("/invocations", content=photo.read_bytes(), headers=JPEG)
    assert answer.status_code == 200
    assert answer.headers["Cicada-Model"] == "resnet50"


def test_openfaas(run: Run, docker: Docker, function: str, photo: Path, manifest: Any) -> None:
    """Port 8080, read-only; health and readiness on their own paths; the gateway's headers; SIGTERM."""
    (described,) = manifest("openfaas.yaml")["functions"].values()
    assert described["readonly_root_filesystem"] is True
    container = run(
        "--read-only",
        "--tmpfs", "/tmp",
        *limited(described["limits"]),
        *given(described["environment"]),
        image=function,
    )  # fmt: skip
    for probe in ("health", "ready"):
        path = described["annotations"][f"com.openfaas.{probe}.http.path"]
        container.wait_until(lambda path=path: container.answers(path, **KUBELET))
    gateway = {
        "X-Call-Id": "0d3ba6a2-6a0c-4a8c-9d3a-9ed5e2a0b4a1",
        "X-Start-Time": "1542409706888000000",
        "X-Forwarded-Host": "127.0.0.1:8080",
        "X-Forwarded-For": "10.0.0.1",
    }
    # The gateway takes its own part of the path, /function/flowers, away.
    told_to_end_at_work(container, docker, "/invocations", photo.read_bytes(), JPEG | gateway)
    ends_in_time(container, docker, 30)
