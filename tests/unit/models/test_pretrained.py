import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torchvision

from models import catalog, pretrained
from models.catalog import UnknownArchitecture
from models.download import DownloadError
from models.pretrained import PretrainedError

CONTENT = b"weights as they are published"
HASH = hashlib.sha256(CONTENT).hexdigest()[:8]


class Published(BaseHTTPRequestHandler):
    """`/resnet18-*.pth` and nothing else."""

    def do_GET(self) -> None:
        if not self.path.startswith("/resnet18-"):
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT)

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture
def host() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Published) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(10)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path))
    return tmp_path / "checkpoints"


def published_at(url: str, monkeypatch: pytest.MonkeyPatch) -> torchvision.models.WeightsEnum:
    member = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    monkeypatch.setattr(member, "_value_", replace(member.value, url=url))
    return member


def test_the_file_is_downloaded_once(
    host: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = published_at(f"{host}/resnet18-{HASH}.pth", monkeypatch)
    path = pretrained.download(member)
    assert path == cache / f"resnet18-{HASH}.pth"
    assert path.read_bytes() == CONTENT
    modified = path.stat().st_mtime_ns
    assert pretrained.download(member) == path
    assert path.stat().st_mtime_ns == modified


def test_a_wrong_hash_is_refused_and_nothing_kept(
    host: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = published_at(f"{host}/resnet18-00000000.pth", monkeypatch)
    with pytest.raises(DownloadError, match="expected one that starts with 00000000"):
        pretrained.download(member)
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache")
def test_a_damaged_file_in_the_cache_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    member = published_at(f"{host}/resnet18-{HASH}.pth", monkeypatch)
    pretrained.download(member).write_bytes(b"cut sho")
    with pytest.raises(PretrainedError, match="delete it and try again"):
        pretrained.download(member)


def test_weights_are_found_by_name() -> None:
    known = torchvision.models.ResNet50_Weights
    assert pretrained.weights("resnet50") is known.IMAGENET1K_V2
    assert pretrained.weights("resnet50", "IMAGENET1K_V1") is known.IMAGENET1K_V1


@pytest.mark.parametrize("name", ["IMAGENET1K_V9", "", "__class__", "url", "verify"])
def test_unknown_weights_are_refused_with_those_there_are(name: str) -> None:
    with pytest.raises(PretrainedError, match="expected one of IMAGENET1K_V1, IMAGENET1K_V2"):
        pretrained.weights("resnet50", name)


def test_weights_without_a_classifier_are_refused() -> None:
    with pytest.raises(PretrainedError, match="have no classifier"):
        pretrained.weights("vgg16", "IMAGENET1K_FEATURES")


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(UnknownArchitecture, match="resnet18"):
        pretrained.weights("resnt18")
    with pytest.raises(UnknownArchitecture):
        pretrained.preset("alexnot", 224)


@pytest.mark.parametrize("name", catalog.NAMES)
def test_each_architecture_s_default_preset_is_torchvision_s(name: str) -> None:
    default = torchvision.models.get_model_weights(name).DEFAULT
    transform = default.transforms()
    found = pretrained.preset(name, transform.crop_size[0])
    assert found.name == default.name
    assert [found.input.resize] == transform.resize_size
    assert list(found.input.mean) == transform.mean
    assert list(found.input.std) == transform.std
    assert found.input.interpolation == transform.interpolation.value


def test_a_vit_s_preset_goes_by_its_image_size() -> None:
    assert pretrained.preset("vit_h_14", 518).name == "IMAGENET1K_SWAG_E2E_V1"
    assert pretrained.preset("vit_h_14", 224).name == "IMAGENET1K_SWAG_LINEAR_V1"
    scaled = pretrained.preset("vit_b_32", 448)
    assert (scaled.input.resize, scaled.input.crop) == (512, 448)
    assert scaled.name == "IMAGENET1K_V1, scaled to 448"


def test_categories_are_for_a_head_of_1000_classes() -> None:
    names = pretrained.categories("resnet18", 1000)
    assert names is not None
    assert (names[0], len(names)) == ("tench", 1000)
    assert pretrained.categories("resnet18", 999) is None
