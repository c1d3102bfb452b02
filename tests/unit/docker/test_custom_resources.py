"""The manifests of other kinds than Kubernetes' own, against those kinds' own schemas.

They are had from the registries that the tests' tools come from, when the tests run: Knative's from the npm package
made of its resource definitions, KServe's from its Python package. Where they cannot be had, these tests are skipped.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

KNATIVE: Final = "@kubernetes-models/knative@4.0.0"
KSERVE: Final = "kserve==0.21.0"
LIMIT_S: Final = 100
SCRIPT: Final = """
import { Service } from "@kubernetes-models/knative/serving.knative.dev/v1/Service";
let text = "";
for await (const chunk of process.stdin) text += chunk;
try {
  new Service(JSON.parse(text)).validate();
} catch (error) {
  console.log(String(error));
  process.exitCode = 1;
}
"""


def fetched(*command: str, folder: Path) -> None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"the schemas cannot be had: {error}")
    if done.returncode != 0:
        pytest.skip(f"the schemas cannot be had: {done.stderr[-300:]}")


@pytest.fixture(scope="session")
def knative(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a script that says what is wrong with a Service."""
    folder = tmp_path_factory.mktemp("knative")
    if shutil.which("node") is None:
        pytest.skip("the schemas cannot be used: there is no node")
    quiet = ("--no-audit", "--no-fund", "--ignore-scripts", "--prefix", ".")
    fetched("npm", "install", *quiet, KNATIVE, folder=folder)
    (folder / "validate.mjs").write_text(SCRIPT)
    return folder


def findings(knative: Path, manifest: dict[str, Any]) -> str:
    done = subprocess.run(
        ["node", "validate.mjs"],
        cwd=knative,
        input=json.dumps(manifest),
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.returncode in {0, 1}
    assert not done.stderr, done.stderr
    return done.stdout


def read(repository: Path, name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((repository / "docker" / name).read_text()))


@pytest.mark.parametrize("name", ["knative.yaml", "cloud-run.yaml"])
def test_knative_services_are_of_knatives_schema(
    knative: Path, repository: Path, name: str
) -> None:
    manifest = read(repository, name)
    assert findings(knative, manifest) == ""
    manifest["spec"]["template"]["spec"]["timeoutSeconds"] = "soon"
    assert "timeoutSeconds" in findings(knative, manifest)


@dataclass(frozen=True, slots=True)
class Kind:
    """One class of KServe's: its fields in JSON, and each one's type as the class says it."""

    fields: Mapping[str, str]


@pytest.fixture(scope="session")
def kserve(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kind]:
    """What KServe's own classes say of their fields; the package itself is read, not installed."""
    folder = tmp_path_factory.mktemp("kserve")
    fetched(sys.executable, "-m", "pip", "download", "--no-deps", KSERVE, folder=folder)
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
