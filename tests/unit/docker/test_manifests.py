"""The manifests in docker/: of the form that their platforms ask for, and in step with the service."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import botocore.session
import botocore.validate
import kubernetes_validate
import pytest
import yaml

from runtime.app import create_app
from runtime.settings import Settings, variable

KUBERNETES: Final = "1.34"
NOT_FOR_THE_CLUSTER: Final = {"kustomization.yaml", "prometheus-adapter.yaml"}
ADAPTER_READS: Final = frozenset(
    f"AWS_LWA_{name}"
    for name in (
        "HOST", "PORT", "READINESS_CHECK_PORT", "READINESS_CHECK_PATH", "READINESS_CHECK_PROTOCOL",
        "READINESS_CHECK_HEALTHY_STATUS", "ASYNC_INIT", "REMOVE_BASE_PATH", "PASS_THROUGH_PATH",
        "ENABLE_COMPRESSION", "INVOKE_MODE", "AUTHORIZATION_SOURCE", "ERROR_STATUS_CODES",
        "LAMBDA_RUNTIME_API_PROXY",
    )
)  # fmt: skip
"""What Lambda's Web Adapter reads, by src/lib.rs of awslabs/aws-lambda-web-adapter at v1.0.0-rc1; v0.9.1 had
READINESS_CHECK_MIN_UNHEALTHY_STATUS for HEALTHY_STATUS."""
PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe")


@pytest.fixture(scope="session")
def folder(repository: Path) -> Path:
    return repository / "docker"


def read(file: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(file.read_text()))


def core_manifests(folder: Path) -> list[Path]:
    return [
        path
        for path in sorted((folder / "kubernetes").iterdir())
        if path.name not in NOT_FOR_THE_CLUSTER
    ]


def pods(folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Where, a pod's specification, and its only container."""
    for name in ("kubernetes/deployment.yaml", "knative.yaml", "cloud-run.yaml"):
        pod = read(folder / name)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        yield name, pod, container
    runtime = read(folder / "kserve" / "runtime.yaml")["spec"]
    (container,) = runtime["containers"]
    yield "kserve/runtime.yaml", runtime, container


def validate(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def as_pod(pod: dict[str, Any]) -> dict[str, Any]:
    """The parts of it that are Kubernetes' own, as a pod."""
    kept = ("automountServiceAccountToken", "containers", "volumes")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "pod"},
        "spec": {name: pod[name] for name in kept if name in pod},
    }


def test_kubernetes_own_kinds_are_of_its_schema(folder: Path) -> None:
    kinds = set()
    for file in core_manifests(folder):
        manifest = read(file)
        validate(manifest)
        kinds.add(manifest["kind"])
    assert kinds == {"Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"}


def test_the_schema_finds_a_wrong_manifest(folder: Path) -> None:
    manifest = read(folder / "kubernetes" / "deployment.yaml")
    manifest["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(manifest)


def test_the_pods_of_other_kinds_are_of_kubernetes_schema(folder: Path) -> None:
    for _, pod, _ in pods(folder):
        validate(as_pod(pod))


def test_every_probe_asks_a_route_that_there_is(folder: Path, tmp_path: Path) -> None:
    routes = create_app(Settings(weights=tmp_path)).openapi()["paths"]
    probed = [
        container[probe]["httpGet"]["path"]
        for _, _, container in pods(folder)
        for probe in PROBES
        if probe in container
    ]
    functions = read(folder / "openfaas.yaml")["functions"].values()
    probed += [
        value
        for each in functions
        for name, value in each["annotations"].items()
        if name.endswith(".path")
    ]
    assert len(probed) >= 10
    for path in probed:
        assert "get" in routes[path]


def test_every_variable_is_a_setting(folder: Path) -> None:
    known = {variable(name) for name in Settings.model_fields}
    named = [each["name"] for _, _, container in pods(folder) for each in container["env"]]
    named += [
        name
        for each in read(folder / "openfaas.yaml")["functions"].values()
        for name in each["environment"]
    ]
    named += list(read(folder / "lambda" / "function.json")["Environment"]["Variables"])
    named += list(read(folder / "sagemaker" / "model.json")["PrimaryContainer"]["Environment"])
    assert named
    assert set(named) <= known


def test_as_many_requests_come_at_once_as_there_are_handlers(folder: Path) -> None:
    for name in ("knative.yaml", "cloud-run.yaml"):
        pod = read(folder / name)["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        assert str(pod["containerConcurrency"]) == environment(container)["CICADA_HANDLERS"]
    predictor = read(folder / "kserve" / "service.yaml")["spec"]["predictor"]
    (container,) = read(folder / "kserve" / "runtime.yaml")["spec"]["containers"]
    assert str(predictor["containerConcurrency"]) == environment(container)["CICADA_HANDLERS"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each["value"] for each in container["env"]}


def test_a_platform_waits_longer_than_the_service_does(folder: Path) -> None:
    ours = Settings.model_fields["timeout_s"].default
    for name in ("knative.yaml", "cloud-run.yaml"):
        assert read(folder / name)["spec"]["template"]["spec"]["timeoutSeconds"] > ours
    assert read(folder / "kserve" / "service.yaml")["spec"]["predictor"]["timeout"] > ours
    assert read(folder / "lambda" / "function.json")["Timeout"] > ours


def test_the_grace_of_kubernetes_is_for_all_that_happens_at_the_end(folder: Path) -> None:
    pod = read(folder / "kubernetes" / "deployment.yaml")["spec"]["template"]["spec"]
    program, seconds = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert (
        int(seconds) + Settings.model_fields["drain_s"].default
        < pod["terminationGracePeriodSeconds"]
    )


def test_the_autoscaler_asks_for_a_metric_that_the_adapter_makes_of_ours(folder: Path) -> None:
    scaler = read(folder / "kubernetes" / "autoscaler.yaml")["spec"]
    (wanted,) = [metric["pods"]["metric"]["name"] for metric in scaler["metrics"]]
    (rule,) = read(folder / "kubernetes" / "prometheus-adapter.yaml")["rules"]["custom"]
    assert rule["name"]["as"] == wanted
    assert rule["seriesQuery"].startswith(f"{wanted}{{")
    assert (
        scaler["scaleTargetRef"]["name"]
        == read(folder / "kubernetes" / "deployment.yaml")["metadata"]["name"]
    )


def test_kubernetes_parts_belong_together(folder: Path) -> None:
    deployment = read(folder / "kubernetes" / "deployment.yaml")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert read(folder / "kubernetes" / "service.yaml")["spec"]["selector"] == labels
    budget = read(folder / "kubernetes" / "disruption-budget.yaml")["spec"]
    assert budget["selector"]["matchLabels"] == labels
    kustomization = read(folder / "kubernetes" / "kustomization.yaml")
    assert {file.name for file in core_manifests(folder)} == set(kustomization["resources"])


def test_kustomize_makes_of_them_what_they_say(folder: Path) -> None:
    """The tool itself, which kubectl contains: its schema would not find a missing file."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl (Debian: kubernetes-client)")
    made = yaml.safe_load_all(
        subprocess.check_output([kubectl, "kustomize", folder / "kubernetes"], text=True)
    )
    by_kind = {manifest["kind"]: manifest for manifest in made}
    assert by_kind == {read(file)["kind"]: read(file) for file in core_manifests(folder)}


def test_kserve_finds_the_runtime_of_the_service(folder: Path) -> None:
    runtime = read(folder / "kserve" / "runtime.yaml")
    model = read(folder / "kserve" / "service.yaml")["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    formats = {supported["name"] for supported in runtime["spec"]["supportedModelFormats"]}
    assert model["modelFormat"]["name"] in formats
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]


def test_lambdas_adapter_reads_the_variables_that_its_image_has(folder: Path) -> None:
    dockerfile = (folder / "lambda" / "Dockerfile").read_text()
    assert re.search(r"/aws-lambda-adapter:1\.\d+\.\d+$", dockerfile, re.MULTILINE)
    given = set(re.findall(r"\bAWS_LWA_\w+(?==)", dockerfile))
    assert given
    assert given <= ADAPTER_READS


@pytest.mark.parametrize(
    ("service", "operation", "file"),
    [
        ("lambda", "CreateFunction", "lambda/function.json"),
        ("sagemaker", "CreateModel", "sagemaker/model.json"),
        ("sagemaker", "CreateEndpointConfig", "sagemaker/endpoint-config.json"),
    ],
)
def test_aws_requests_are_of_its_own_model(
    folder: Path, service: str, operation: str, file: str
) -> None:
    model = botocore.session.get_session().get_service_model(service)
    shape = model.operation_model(operation).input_shape
    request = json.loads((folder / file).read_text())
    report = botocore.validate.ParamValidator().validate(request, shape)
    assert not report.has_errors(), report.generate_report()
