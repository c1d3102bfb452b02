"""The manifests of other kinds than Kubernetes' own, against those kinds' own schemas.

- Knative's is the resource definition as classes.
- KServe's are the classes of its Python client, had from its package when these tests run, without which they are
  skipped: the definitions themselves are in its repository and its charts alone.
- OpenFaaS has none to be had, and Cloud Run's comes with 100 MB of clients for all of Google's services: written down
  here are the fields of their files.
"""

import ast
import json
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pydantic
import pytest
import yaml
from cloudcoil.models.knative_serving.serving.v1 import Service
from jsonschema import Draft202012Validator

KSERVE: Final = "kserve==0.21.0"
NO_KSERVE: Final = f"KServe's resources are not validated, as pip cannot download {KSERVE}"
LIMIT_S: Final = 100
TEXT: Final = {"type": "string"}
WHOLE: Final = {"type": "integer"}
YES_OR_NO: Final = {"type": "boolean"}
NAMED_TEXTS: Final = {"type": "object", "additionalProperties": TEXT}
ANYTHING: Final[dict[str, Any]] = {}


def record(**fields: Mapping[str, Any]) -> dict[str, Any]:
    """An object that has no other fields."""
    return {"type": "object", "additionalProperties": False, "properties": fields}


def several(item: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


RESOURCES: Final = record(memory=TEXT, cpu=TEXT)
FUNCTION: Final = record(
    lang=TEXT,
    handler=TEXT,
    image=TEXT,
    fprocess=TEXT,
    environment=NAMED_TEXTS,
    environment_file=several(TEXT),
    secrets=several(TEXT),
    skip_build=YES_OR_NO,
    constraints=several(TEXT),
    labels=NAMED_TEXTS,
    annotations=NAMED_TEXTS,
    limits=RESOURCES,
    requests=RESOURCES,
    readonly_root_filesystem=YES_OR_NO,
    build_options=several(TEXT),
    build_args=NAMED_TEXTS,
    build_secrets=NAMED_TEXTS,
    platforms=TEXT,
    namespace=TEXT,
) | {"required": ["image"]}
STACK: Final = record(
    version={"const": 1.0},
    provider=record(name={"const": "openfaas"}, gateway=TEXT) | {"required": ["name"]},
    functions={"type": "object", "additionalProperties": FUNCTION},
    configuration=ANYTHING,
) | {"required": ["version", "provider", "functions"]}
"""Of the types Services, Provider and Function in stack/schema.go of openfaas/go-sdk 0.2.22, with which faas-cli
0.18.12 reads a stack file; it ignores what it does not know, this does not."""

METADATA: Final = record(
    name=TEXT,
    namespace=TEXT,
    labels=NAMED_TEXTS,
    annotations=NAMED_TEXTS,
    generateName=TEXT,
    generation=WHOLE,
    uid=TEXT,
    resourceVersion=TEXT,
    selfLink=TEXT,
    creationTimestamp=TEXT,
    deletionTimestamp=TEXT,
    deletionGracePeriodSeconds=WHOLE,
    finalizers=several(TEXT),
    ownerReferences=ANYTHING,
    clusterName=TEXT,
)
PROBE: Final = record(
    httpGet=record(
        path=TEXT,
        port=WHOLE,
        scheme=TEXT,
        host=TEXT,
        httpHeaders=several(record(name=TEXT, value=TEXT)),
    ),
    tcpSocket=record(host=TEXT, port=WHOLE),
    grpc=record(port=WHOLE, service=TEXT),
    exec=record(command=several(TEXT)),
    initialDelaySeconds=WHOLE,
    periodSeconds=WHOLE,
    timeoutSeconds=WHOLE,
    successThreshold=WHOLE,
    failureThreshold=WHOLE,
)
CONTAINER: Final = record(
    name=TEXT,
    image=TEXT,
    imagePullPolicy=TEXT,
    command=several(TEXT),
    args=several(TEXT),
    workingDir=TEXT,
    env=several(record(name=TEXT, value=TEXT, valueFrom=ANYTHING)),
    envFrom=ANYTHING,
    ports=several(record(name=TEXT, containerPort=WHOLE, protocol=TEXT)),
    resources=record(limits=NAMED_TEXTS, requests=NAMED_TEXTS),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    securityContext=record(runAsUser=WHOLE),
    volumeMounts=several(record(name=TEXT, mountPath=TEXT, subPath=TEXT, readOnly=YES_OR_NO)),
    sandboxLauncher=YES_OR_NO,
    terminationMessagePath=TEXT,
    terminationMessagePolicy=TEXT,
)
REVISION: Final = record(
    containers=several(CONTAINER),
    containerConcurrency=WHOLE,
    timeoutSeconds=WHOLE,
    serviceAccountName=TEXT,
    volumes=ANYTHING,
    sandboxes=ANYTHING,
    imagePullSecrets=several(record(name=TEXT)),
    nodeSelector=NAMED_TEXTS,
    runtimeClassName=TEXT,
    enableServiceLinks=YES_OR_NO,
)
CLOUD_RUN: Final = record(
    apiVersion=TEXT,
    kind=TEXT,
    metadata=METADATA,
    spec=record(
        template=record(metadata=METADATA, spec=REVISION),
        traffic=several(
            record(
                configurationName=TEXT,
                revisionName=TEXT,
                latestRevision=YES_OR_NO,
                percent=WHOLE,
                tag=TEXT,
                url=TEXT,
            )
        ),
    ),
)
"""Of the type Service in the discovery document of the Cloud Run Admin API v1, revision 20261031, which
google-api-python-client 2.202.0 ships: the fields' names and types, without the status. What is anything here is of a
type that our service has no use for."""


def read(repository: Path, name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((repository / "docker" / name).read_text()))


def findings(schema: Mapping[str, Any], manifest: Mapping[str, Any]) -> list[str]:
    errors = Draft202012Validator(schema).iter_errors(manifest)
    return [f"{error.json_path}: {error.message}" for error in errors]


def as_knative_reads_it(manifest: Mapping[str, Any]) -> Any:
    """Without the fields that it does not know."""
    service = Service.model_validate(manifest, strict=True)
    return json.loads(service.model_dump_json(by_alias=True, exclude_unset=True))


def test_the_knative_service_is_of_knatives_schema(repository: Path) -> None:
    manifest = read(repository, "knative.yaml")
    assert as_knative_reads_it(manifest) == manifest


def test_knatives_schema_finds_a_wrong_manifest(repository: Path) -> None:
    manifest = read(repository, "knative.yaml")
    spec = manifest["spec"]["template"]["spec"]
    spec["containerConcurency"] = 1
    assert as_knative_reads_it(manifest) != manifest
    spec["timeoutSeconds"] = "soon"
    with pytest.raises(pydantic.ValidationError, match="timeoutSeconds"):
        as_knative_reads_it(manifest)


def test_the_cloud_run_service_is_of_its_apis_type(repository: Path) -> None:
    assert findings(CLOUD_RUN, read(repository, "cloud-run.yaml")) == []


def test_cloud_runs_type_finds_a_wrong_manifest(repository: Path) -> None:
    manifest = read(repository, "cloud-run.yaml")
    spec = manifest["spec"]["template"]["spec"]
    spec["timeoutSeconds"] = "soon"
    spec["containers"][0]["startUpProbe"] = {}
    found = findings(CLOUD_RUN, manifest)
    assert [each.partition(":")[0] for each in found] == [
        "$.spec.template.spec.containers[0]",
        "$.spec.template.spec.timeoutSeconds",
    ]


def test_the_openfaas_stack_has_the_fields_that_faas_cli_reads(repository: Path) -> None:
    manifest = read(repository, "openfaas.yaml")
    assert findings(STACK, manifest) == []
    manifest["functions"]["flowers"]["labels"]["com.openfaas.scale.min"] = 1
    assert findings(STACK, manifest) == [
        "$.functions.flowers.labels['com.openfaas.scale.min']: 1 is not of type 'string'"
    ]


@dataclass(frozen=True, slots=True)
class Kind:
    """One class of KServe's: its fields in JSON, and each one's type as the class says it."""

    fields: Mapping[str, str]


@pytest.fixture(scope="session")
def kserve(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    """What KServe's own classes say of their fields; the package itself is read, not installed."""
    folder = tmp_path_factory.mktemp("kserve")
    command = (sys.executable, "-m", "pip", "download", "--no-deps", KSERVE)
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        pytest.skip(f"{NO_KSERVE}: {error}")
    if done.returncode != 0:
        pytest.skip(f"{NO_KSERVE}: {done.stderr[-300:]}")
    (wheel,) = folder.glob("*.whl")
    kinds: dict[str, Kind] = {}
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.startswith("kserve/models/v1"):
                kinds |= _kinds(ast.parse(files.read(name)))
    assert "V1beta1InferenceService" in kinds
    return kinds


def _kinds(module: ast.Module) -> dict[str, Kind]:
    kinds = {}
    for node in module.body:
        if isinstance(node, ast.ClassDef):
            tables = {
                target.id: ast.literal_eval(statement.value)
                for statement in node.body
                if isinstance(statement, ast.Assign)
                for target in statement.targets
                if isinstance(target, ast.Name) and isinstance(statement.value, ast.Dict)
            }
            types, names = tables["openapi_types"], tables["attribute_map"]
            kinds[node.name] = Kind({names[field]: types[field] for field in types})
    return kinds


SIMPLE: Final[dict[str, type]] = {"str": str, "int": int, "bool": bool, "float": float}


def wrong(kinds: dict[str, Kind], kind: str, value: Any, where: str = "") -> list[str]:
    """What is wrong with a value of a kind; those of Kubernetes' own are left to Kubernetes' schema."""
    if kind in SIMPLE:
        return [] if isinstance(value, SIMPLE[kind]) else [f"{where}: {value!r} is no {kind}"]
    if kind.startswith("list["):
        item = kind.removeprefix("list[").removesuffix("]")
        return [each for one in value for each in wrong(kinds, item, one, where)]
    if kind not in kinds:
        return []
    found = []
    for name, member in value.items():
        field = kinds[kind].fields.get(name)
        place = f"{where}.{name}"
        found += [f"{place}: unknown"] if field is None else wrong(kinds, field, member, place)
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("kserve/runtime.yaml", "V1alpha1ServingRuntime"),
        ("kserve/service.yaml", "V1beta1InferenceService"),
    ],
)
def test_kserve_resources_are_of_kserves_classes(
    kserve: dict[str, Kind], repository: Path, name: str, kind: str
) -> None:
    manifest = read(repository, name)
    assert wrong(kserve, kind, manifest) == []
    manifest["spec"]["protocolVersion"] = "v2"
    assert wrong(kserve, kind, manifest) == [".spec.protocolVersion: unknown"]
