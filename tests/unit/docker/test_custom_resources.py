"""The manifests of other kinds than Kubernetes' own, against those kinds' own schemas.

- Knative's is the resource definition as classes, Cloud Run's the discovery document that Google's client ships.
- KServe's are the classes of its Python client, had from its package when these tests run, without which they are
  skipped: the definitions themselves are in its repository and its charts alone.
- OpenFaaS has none to be had: written down here are the fields of a stack file that faas-cli reads.
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
from googleapiclient.discovery_cache import get_static_doc
from jsonschema import Draft202012Validator

KSERVE: Final = "kserve==0.21.0"
LIMIT_S: Final = 100
TEXT: Final = {"type": "string"}
YES_OR_NO: Final = {"type": "boolean"}
TEXTS: Final = {"type": "array", "items": TEXT}
NAMED_TEXTS: Final = {"type": "object", "additionalProperties": TEXT}
RESOURCES: Final = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"memory": TEXT, "cpu": TEXT},
}
FUNCTION: Final = {
    "type": "object",
    "additionalProperties": False,
    "required": ["image"],
    "properties": {
        "lang": TEXT,
        "handler": TEXT,
        "image": TEXT,
        "fprocess": TEXT,
        "environment": NAMED_TEXTS,
        "environment_file": TEXTS,
        "secrets": TEXTS,
        "skip_build": YES_OR_NO,
        "constraints": TEXTS,
        "labels": NAMED_TEXTS,
        "annotations": NAMED_TEXTS,
        "limits": RESOURCES,
        "requests": RESOURCES,
        "readonly_root_filesystem": YES_OR_NO,
        "build_options": TEXTS,
        "build_args": NAMED_TEXTS,
        "namespace": TEXT,
    },
}
STACK: Final = {
    "type": "object",
    "additionalProperties": False,
    "required": ["version", "provider", "functions"],
    "properties": {
        "version": {"const": 1.0},
        "provider": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {"name": {"const": "openfaas"}, "gateway": TEXT},
        },
        "functions": {"type": "object", "additionalProperties": FUNCTION},
    },
}
"""Of faas-cli's types Services, Provider and Function; it ignores what it does not know, this does not."""


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


@pytest.fixture(scope="session")
def cloud_run() -> dict[str, Any]:
    """Its API's types, which are JSON schemas but for their references; here no field but theirs is allowed."""
    document = json.loads(get_static_doc("run", "v1"))
    return {"$ref": "#/$defs/Service", "$defs": strict(document["schemas"])}


def strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: strict(value) for name, value in schema.items()}
    if isinstance(schema.get("$ref"), str):
        inner["$ref"] = f"#/$defs/{schema['$ref']}"
    if schema.get("type") == "object":
        inner.setdefault("additionalProperties", False)
    return inner


def test_the_cloud_run_service_is_of_its_apis_type(
    cloud_run: dict[str, Any], repository: Path
) -> None:
    assert findings(cloud_run, read(repository, "cloud-run.yaml")) == []


def test_cloud_runs_type_finds_a_wrong_manifest(
    cloud_run: dict[str, Any], repository: Path
) -> None:
    manifest = read(repository, "cloud-run.yaml")
    spec = manifest["spec"]["template"]["spec"]
    spec["timeoutSeconds"] = "soon"
    spec["containers"][0]["startUpProbe"] = {}
    found = findings(cloud_run, manifest)
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
        pytest.skip(f"KServe's classes cannot be had: {error}")
    if done.returncode != 0:
        pytest.skip(f"KServe's classes cannot be had: {done.stderr[-300:]}")
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
