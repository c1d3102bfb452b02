"""Weight files and manifests that are damaged or replaced under a running service."""

import hashlib
import json
import os
import re
import shutil
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from models import catalog, preparation
from models.pretrained import preset
from models.random_weights import RandomWeights
from models.store import PreparedModel, Store
from runtime.errors import Fault, Unavailable
from runtime.verification import Verification

Eventually = Callable[[Callable[[], object]], None]
StartServer = Callable[..., Any]

CLASSES = 3
SEEDS = (0, 1, 2, 3)
PREPARATIONS = 100
CHAIN = catalog.architecture("resnet18", classes=CLASSES)


def source(seed: int) -> preparation.Source:
    weights = dict(RandomWeights(CHAIN, seed))
    return preparation.Source(
        f"random:{seed}", CHAIN, weights, preset("resnet18", CHAIN.image_size)
    )


@pytest.fixture(scope="module")
def sources() -> list[preparation.Source]:
    return [source(seed) for seed in SEEDS]


@pytest.fixture(scope="module")
def prepared(sources: list[preparation.Source], tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store with one sound model; damaged ones are copies of it, since a version has no name in it."""
    store = Store(tmp_path_factory.mktemp("prepared") / "weights")
    preparation.prepare(store, "sound", sources[0], "safetensors")
    return store


def copy(store: Store, model: PreparedModel, name: str) -> Path:
    """The model under another name; its files are links to the first one's, to be replaced, not written."""
    folder = store.root / ".versions" / name / model.version
    shutil.copytree(model.path, folder, copy_function=os.link)
    (store.root / name).symlink_to(f".versions/{name}/{model.version}")
    return folder


def replace(path: Path, content: bytes) -> None:
    path.unlink()
    path.write_bytes(content)


CONV = "000-conv1.safetensors"
FC = "013-fc.safetensors"


def missing(folder: Path) -> str:
    (folder / CONV).unlink()
    return CONV


def cut_short(folder: Path) -> str:
    replace(folder / CONV, (folder / CONV).read_bytes()[:-1])
    return CONV


def too_long(folder: Path) -> str:
    replace(folder / FC, (folder / FC).read_bytes() + b"\0")
    return FC


def empty(folder: Path) -> str:
    replace(folder / CONV, b"")
    return CONV


def swapped(folder: Path) -> str:
    (folder / CONV).rename(folder / "x")
    (folder / FC).rename(folder / CONV)
    (folder / "x").rename(folder / FC)
    return CONV


def a_folder(folder: Path) -> str:
    (folder / CONV).unlink()
    (folder / CONV).mkdir()
    return CONV


def a_link_out(folder: Path) -> str:
    (folder / CONV).unlink()
    (folder / CONV).symlink_to("/etc/passwd")
    return CONV


def a_pipe(folder: Path) -> str:
    (folder / CONV).unlink()
    os.mkfifo(folder / CONV)
    return CONV


def without_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json"


def with_half_a_manifest(folder: Path) -> str:
    whole = (folder / "manifest.json").read_bytes()
    replace(folder / "manifest.json", whole[: len(whole) // 2])
    return "manifest.json"


def with_another_hash(folder: Path) -> str:
    whole = json.loads((folder / "manifest.json").read_bytes())
    whole["layers"][0]["sha256"] = "0" * 64
    replace(folder / "manifest.json", json.dumps(whole).encode())
    return "manifest.json"


def with_a_binary_manifest(folder: Path) -> str:
    replace(folder / "manifest.json", os.urandom(1000))
    return "manifest.json"


DAMAGES = (
    missing,
    cut_short,
    too_long,
    empty,
    swapped,
    a_folder,
    a_link_out,
    a_pipe,
    without_manifest,
    with_half_a_manifest,
    with_another_hash,
    with_a_binary_manifest,
)


@pytest.fixture(scope="module")
def damaged(prepared: Store) -> dict[str, str]:
    """Model name -> the file that its error must name."""
    sound = prepared.open("sound")
    named = {}
    for number, damage in enumerate(DAMAGES):
        name = f"damaged-{number}"
        named[name] = damage(copy(prepared, sound, name))
    return named


def test_damage_is_a_500_that_names_model_and_file_and_others_stay_served(
    start_server: StartServer, prepared: Store, damaged: dict[str, str], photo: Path
) -> None:
    server = start_server(CICADA_WEIGHTS=str(prepared.root))
    server.wait_until_ready()
    image = photo.read_bytes()
    for name, file in damaged.items():
        answer = server.client.post(f"/predictions/{name}", content=image)
        sentence = answer.json()["error"]
        assert (answer.status_code, sentence.startswith(f"model '{name}': {file}: ")) == (
            500,
            True,
        ), sentence
        assert str(prepared.root) not in answer.text
        assert "Traceback" not in answer.text
        assert server.client.post("/predictions/sound", content=image).status_code == 200
    assert not server.events("handler ended")


def test_names_and_manifests_cannot_lead_out_of_the_store(
    start_server: StartServer, prepared: Store, photo: Path, tmp_path: Path
) -> None:
    """Manifests that are well hashed, as only somebody who may write to the store can make them."""
    store = Store(tmp_path / "weights")
    sound = prepared.open("sound")
    (tmp_path / "outside.safetensors").write_bytes((sound.path / CONV).read_bytes())
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda m: m["layers"][0].update(file="../../../../outside.safetensors"),
        lambda m: m["layers"][0].update(file="/etc/passwd"),
        lambda m: m["layers"][0].update(name="../../../../outside"),
        lambda m: m["layers"][0]["parameters"][0].update(offset=1 << 40),
        lambda m: m["layers"][0]["parameters"][0].update(shape=[1 << 40]),
        lambda m: m["layers"][0]["parameters"][0].update(name="x"),
        lambda m: m.update(labels="../../../../etc/passwd"),
        lambda m: m.update(architecture="../resnet18"),
        lambda m: m.update(classes=4),
        lambda m: m.update(image_size=1 << 40, architecture="vit_b_16"),
    ]
    for number, change in enumerate(changes):
        folder = tmp_path / "new"
        shutil.copytree(sound.path, folder, copy_function=os.link)
        manifest = json.loads((folder / "manifest.json").read_bytes())
        change(manifest)
        encoded = json.dumps(manifest).encode()
        replace(folder / "manifest.json", encoded)
        version = hashlib.sha256(encoded).hexdigest()[:12]
        place = store.root / ".versions" / f"m{number}" / version
        place.parent.mkdir(parents=True)
        folder.rename(place)
        (store.root / f"m{number}").symlink_to(f".versions/m{number}/{version}")
    server = start_server(CICADA_WEIGHTS=str(store.root))
    eventually_up = server.client.get("/v2/health/live")
    assert eventually_up.status_code == 200
    for number in range(len(changes)):
        answer = server.client.post(f"/predictions/m{number}", content=photo.read_bytes())
        assert answer.status_code == 500, (number, answer.text)
        assert answer.json()["error"].startswith(f"model 'm{number}': "), (number, answer.text)
        assert str(tmp_path) not in answer.text
    assert server.client.post("/predictions/..", content=b"x").status_code == 405  # it asks for `/`
    for name in ("%2e%2e", "..%2f..%2fetc", ".versions", "a%00b", "%2fetc%2fpasswd"):
        assert server.client.post(f"/predictions/{name}", content=b"x").status_code == 404
    assert not server.events("handler ended")


def test_verifying_first_finds_damage_that_keeps_the_size_and_serves_the_rest(
    start_server: StartServer,
    sources: list[preparation.Source],
    prepared: Store,
    photo: Path,
    tmp_path: Path,
) -> None:
    store = Store(tmp_path / "weights")
    sound = prepared.open("sound")
    copy(store, sound, "sound")
    folder = copy(store, sound, "rotten")
    rotten = bytearray((folder / CONV).read_bytes())
    rotten[-100] ^= 1
    replace(folder / CONV, bytes(rotten))
    image = photo.read_bytes()

    careless = start_server(CICADA_WEIGHTS=str(store.root))
    careless.wait_until_ready()
    assert careless.client.post("/predictions/rotten", content=image).status_code == 200
    assert careless.stop() == 0

    careful = start_server(CICADA_WEIGHTS=str(store.root), CICADA_VERIFY="true")
    early = careful.client.post("/predictions/sound", content=image)
    assert early.status_code == 503
    assert "being verified" in early.json()["error"]
    careful.wait_until_ready()
    assert careful.client.post("/predictions/sound", content=image).status_code == 200
    assert careful.client.get("/v2/models/sound/ready").status_code == 200
    assert careful.client.get("/v2/models/rotten/ready").status_code == 500
    answer = careful.client.post("/predictions/rotten", content=image)
    assert answer.status_code == 500
    assert answer.json()["error"].startswith(f"model 'rotten': {CONV}: has sha256 ")
    (event,) = careful.events("damaged")
    assert event["model"] == "rotten"
    preparation.prepare(store, "rotten", sources[1], "safetensors")
    assert careful.client.post("/predictions/rotten", content=image).status_code == 200


@pytest.mark.anyio
async def test_until_it_is_verified_nothing_is_served(prepared: Store, tmp_path: Path) -> None:
    verification = Verification(prepared.root)
    with pytest.raises(Unavailable, match="being verified"):
        verification.require_sound(prepared.open("sound"))
    await verification.run()
    assert verification.why_not_ready() is None
    verification.require_sound(prepared.open("sound"))
    unreadable = tmp_path / "file"
    unreadable.write_bytes(b"")
    failing = Verification(unreadable)
    await failing.run()
    with pytest.raises((Unavailable, Fault), match="could not be verified"):
        failing.require_sound(prepared.open("sound"))


def binary_request(value: Tensor) -> tuple[bytes, dict[str, str]]:
    """The protocol's binary tensor extension, logits in JSON."""
    content = value.numpy().tobytes()
    described = {
        "name": "input",
        "shape": list(value.shape),
        "datatype": "FP32",
        "parameters": {"binary_data_size": len(content)},
    }
    header = json.dumps({"inputs": [described], "outputs": [{"name": "logits"}]}).encode()
    return header + content, {"Inference-Header-Content-Length": str(len(header))}


def expected_logits(weights: preparation.Source, value: Tensor) -> Tensor:
    model = catalog.torchvision_model("resnet18", classes=CLASSES)
    model.load_state_dict(dict(weights.weights))
    with torch.inference_mode():
        logits: Tensor = model(value)
    return logits


@pytest.mark.usefixtures("one_thread")
def test_a_model_prepared_a_hundred_times_under_load_never_mixes_versions(
    start_server: StartServer, sources: list[preparation.Source], tmp_path: Path
) -> None:
    store = Store(tmp_path / "weights")
    value = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(5))
    expected = {
        preparation.prepare(store, "m", weights, "safetensors").version: expected_logits(
            weights, value
        )
        for weights in sources
    }
    assert len(expected) == len(SEEDS)
    server = start_server(CICADA_WEIGHTS=str(store.root), CICADA_HANDLERS="2")
    server.wait_until_ready()
    content, headers = binary_request(value)
    answers: list[httpx.Response] = []
    done = threading.Event()

    def ask(strategy: str) -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while not done.is_set():
                asked = {**headers, "Cicada-Strategy": strategy}
                answers.append(client.post("/v2/models/m/infer", content=content, headers=asked))

    asking = [threading.Thread(target=ask, args=(name,)) for name in ("cicada", "mini")]
    for thread in asking:
        thread.start()
    try:
        for number in range(PREPARATIONS):
            preparation.prepare(store, "m", sources[number % len(SEEDS)], "safetensors")
    finally:
        done.set()
        for thread in asking:
            thread.join(60)
    seen = set()
    for answer in answers:
        assert answer.status_code == 200, answer.text
        version = answer.headers["Cicada-Version"]
        assert answer.json()["model_version"] == version
        logits = torch.tensor(answer.json()["outputs"][0]["data"]).reshape(1, CLASSES)
        assert torch.equal(logits, expected[version])
        seen.add(version)
    assert len(seen) > 1
    assert len(store.versions("m")) <= 2


def changed(base: preparation.Source, change: Callable[[Tensor], Tensor]) -> preparation.Source:
    """The same with every matrix changed."""
    weights = {
        key: change(tensor) if tensor.dim() > 1 else tensor for key, tensor in base.weights.items()
    }
    return preparation.Source(base.name, base.architecture, weights, base.preset)


def test_weights_that_are_no_numbers_give_an_answer_that_says_so(
    start_server: StartServer, sources: list[preparation.Source], photo: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path / "weights")
    broken = changed(sources[0], lambda tensor: torch.full_like(tensor, torch.nan))
    preparation.prepare(store, "m", broken, "safetensors")
    server = start_server(CICADA_WEIGHTS=str(store.root))
    labels = server.client.post("/predictions/m", content=photo.read_bytes())
    assert labels.status_code == 200
    assert [(label["probability"], label["finite"]) for label in labels.json()] == [
        (None, False)
    ] * CLASSES
    content, headers = binary_request(torch.zeros(1, 3, 224, 224))
    answer = server.client.post("/v2/models/m/infer", content=content, headers=headers)
    (output,) = answer.json()["outputs"]
    assert output["data"] == [None] * CLASSES
    assert output["parameters"] == {"finite": False}


def test_denormal_weights_do_not_slow_a_request_down(
    start_server: StartServer, sources: list[preparation.Source], photo: Path, tmp_path: Path
) -> None:
    store = Store(tmp_path / "weights")
    preparation.prepare(store, "usual", sources[0], "safetensors")
    tiny = changed(sources[0], lambda tensor: tensor * 1e-38)
    preparation.prepare(store, "tiny", tiny, "safetensors")
    server = start_server(CICADA_WEIGHTS=str(store.root))
    image = photo.read_bytes()

    def pipeline_ms(model: str) -> float:
        answer = server.client.post(f"/predictions/{model}", content=image)
        assert answer.status_code == 200
        (found,) = re.findall(r"pipeline;dur=([0-9.]+)", answer.headers["Server-Timing"])
        return float(found)

    rounds = [(pipeline_ms("usual"), pipeline_ms("tiny")) for _ in range(9)]
    usual, denormal = (statistics.median(times) for times in zip(*rounds[2:], strict=True))
    assert denormal < 2 * usual
