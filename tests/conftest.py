"""What every test may ask for."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from models.manifest import Granularity, InputSpec, LayerEntry, Manifest
from models.store import Store

REPOSITORY = Path(__file__).resolve().parent.parent

# Before torch is there: OpenMP's threads would spin for each other, on the cores that other processes of the
# same test need. Measurements are made elsewhere.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--every-classifier",
        action="store_true",
        help="test all of torchvision's classifiers, not one of each family (some minutes)",
    )


@pytest.fixture(scope="session", autouse=True)
def _settings_are_the_tests_own() -> Iterator[None]:
    """The service reads the environment: a developer's own settings must not reach the tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(("CICADA_", "OTEL_")) or name in {"HOST", "PORT"}:
                patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def photo() -> Path:
    """A real photo: JPEG, 512 x 600, RGB (docs/photo/PROVENANCE.md)."""
    return REPOSITORY / "docs" / "photo" / "grace_hopper.jpg"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _prepare_tiny(store: Path, name: str = "tiny", granularity: Granularity = "block") -> str:
    layer = LayerEntry(index=0, name="relu", file=None, bytes=0, sha256=None, parameters=())
    manifest = Manifest(
        format_version=1,
        architecture="tiny",
        image_size=2,
        granularity=granularity,
        weight_format="safetensors",
        classes=3,
        input=InputSpec(resize=2, crop=2, mean=(0, 0, 0), std=(1, 1, 1), interpolation="bilinear"),
        labels=None,
        source="random:0",
        layers=(layer,),
    )
    with Store(store).writer(name) as writer:
        return writer.publish(manifest).version


@pytest.fixture(scope="session")
def prepare_tiny() -> Callable[..., str]:
    """Prepares a model for stub handlers: without weights, its input 3 x 2 x 2, 3 classes. Returns its version."""
    return _prepare_tiny


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with such a model, `tiny`."""
    store = tmp_path_factory.mktemp("tiny") / "weights"
    _prepare_tiny(store)
    return store
