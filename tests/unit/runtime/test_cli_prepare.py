"""`cicada prepare`, `inspect` and `remove`, in this process and as a user's processes."""

import argparse
import hashlib
import http.server
import json
import os
import pty
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
from typer.testing import CliRunner, Result

from models import optimization
from models.store import Store
from runtime.cli import app

CICADA = (sys.executable, "-m", "runtime.cli")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return tmp_path / "weights"


Cicada = Callable[..., Result]


@pytest.fixture
def cicada(weights: Path) -> Cicada:
    def run(*arguments: object) -> Result:
        words = [str(argument) for argument in arguments]
        return CliRunner().invoke(app, [*words, "--weights", str(weights)], prog_name="cicada")

    return run


def left_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def rows(output: str) -> dict[str, str]:
    """A summary's rows, by title."""
    return {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in output.splitlines()}


def test_help_and_usage_errors_come_without_torch() -> None:
    script = (
        "import sys; from runtime.cli import app; app(sys.argv[1:], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    for arguments in (
        ["--help"],
        ["prepare", "--help"],
        ["inspect", "--help"],
        ["serve", "--help"],
    ):
        command = [sys.executable, "-c", script, *arguments]
        run = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        assert run.returncode == 0, arguments


def test_random_weights_are_prepared_and_summarized(cicada: Cicada, weights: Path) -> None:
    result = cicada("prepare", "resnet18", "--random", "3")
    assert result.exit_code == 0, result.output
    model = Store(weights).open("resnet18")
    summary = rows(result.stdout)
    assert summary["model"] == "resnet18"
    assert summary["version"] == model.version
    assert summary["architecture"] == "resnet18"
    assert summary["classes"] == "1000"
    assert summary["layers"] == "14, by block"
    assert summary["files"] == "11, safetensors"
    assert f"({model.bytes} bytes)" in summary["size"]
    assert summary["source"] == "random:3"
    assert summary["dtype"] == "F32"
    assert summary["preset"] == "IMAGENET1K_V1: resize 256, crop 224, bilinear"
    assert summary["normalize"] == "mean 0.485, 0.456, 0.406, std 0.229, 0.224, 0.225"
    assert float(summary["seconds"]) >= 0
    assert "labels mean nothing, timings do" in result.stdout
    assert result.stderr == "preparing resnet18: 46.8 MB\n"


def test_a_checkpoint_under_a_name_of_its_own(
    cicada: Cicada, weights: Path, tmp_path: Path
) -> None:
    trained = torchvision.models.resnet18(num_classes=4)
    torch.save({"model": trained.state_dict(), "net": trained.state_dict()}, tmp_path / "c.pth")
    arguments = (
        "prepare",
        "pets",
        "--architecture",
        "resnet18",
        "--checkpoint",
        tmp_path / "c.pth",
    )
    ambiguous = cicada(*arguments)
    assert ambiguous.exit_code == 1
    assert "choose one with --key: model, net" in ambiguous.stderr
    result = cicada(*arguments, "--key", "net", "--granularity", "stage", "--format", "pth")
    assert result.exit_code == 0, result.output
    assert "labels mean nothing" not in result.stdout
    manifest = Store(weights).open("pets").manifest
    assert (manifest.architecture, manifest.granularity) == ("resnet18", "stage")
    assert (manifest.weight_format, manifest.classes, manifest.labels) == ("pth", 4, None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prepare", "resnt18", "--random", "0"), "did you mean resnet18"),
        (("prepare", "Caps", "--random", "0", "--architecture", "resnet18"), "is no model name"),
        (("prepare", "../x", "--random", "0", "--architecture", "resnet18"), "is no model name"),
        (("prepare", "resnet18", "--checkpoint", "absent.pth"), "absent.pth: No such file"),
        (("prepare", "resnet18", "--checkpoint", "/"), "/: Is a directory"),
        (("prepare", "resnet18", "--checkpoint", "/dev/null"), "/dev/null is empty"),
        (("prepare", "resnet18", "--pretrained", "NOPE"), "expected one of IMAGENET1K_V1"),
        (("prepare", "vgg16", "--pretrained", "IMAGENET1K_FEATURES"), "no classifier"),
        (("prepare", "vit_b_32", "--random", "0", "--crop", "100"), "no images of 100 x 100"),
        (("prepare", "vgg11", "--random", "0", "--crop", "16"), "no images of 16 x 16"),
        (("remove", "resnet18"), "there is no model 'resnet18'"),
        (("inspect", "resnet18"), "there is no model 'resnet18'"),
        (("inspect", "../x"), "there is no model '../x'"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_on_stderr(
    cicada: Cicada, weights: Path, arguments: tuple[str, ...], message: str
) -> None:
    result = cicada(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("cicada: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not weights.exists()


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--random", "0", "--pretrained"),
        ("--random", "0", "--checkpoint", "x"),
        ("--random", "zero"),
        ("--random", "0", "--granularity", "fine"),
        ("--random", "0", "--format", "onnx"),
        ("--random", "0", "--key", "model"),
        ("--pretrained", "imagenet1k_v1"),
        ("--random", "0", "--all-pretrained"),
        ("--all-pretrained",),  # with a name
        ("--random", "0", "--dtype", "int8"),
        ("--random", "0", "--resize", "big"),
        ("--random", "0", "--resize", "256x"),
        ("--random", "0", "--crop", "0"),
        ("--random", "0", "--mean", "0.5,0.5"),
        ("--random", "0", "--std", "a,b,c"),
        ("--random", "0", "--interpolation", "sharp"),
    ],
)
def test_wrong_usage_exits_with_2(cicada: Cicada, options: tuple[str, ...]) -> None:
    assert cicada("prepare", "resnet18", *options).exit_code == 2


def test_exactly_one_source_is_asked_for(cicada: Cicada) -> None:
    result = cicada("prepare", "resnet18", "--random", "0", "--checkpoint", "x")
    message = " ".join(result.stderr.split())
    assert "expected exactly one of --checkpoint, --random, --pretrained" in message
    assert "found --checkpoint and --random" in message


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A stand-in for torchvision's host with one file; yields its address."""
    folder = tmp_path_factory.mktemp("host")
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18().state_dict(), folder / "new.pth")
    digest = hashlib.sha256((folder / "new.pth").read_bytes()).hexdigest()[:8]
    (folder / "new.pth").rename(folder / f"resnet18-{digest}.pth")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_arguments: object) -> None:
            pass

    handler = partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/resnet18-{digest}.pth"
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize(
    "words",
    [
        ("resnet18", "--pretrained"),
        ("--pretrained", "resnet18"),
        ("resnet18", "--pretrained", "IMAGENET1K_V1"),
        ("resnet18", "--pretrained=IMAGENET1K_V1"),
        ("resnet18", "--pretrained", "DEFAULT"),
    ],
)
def test_pretrained_weights_with_and_without_their_name(
    cicada: Cicada,
    weights: Path,
    published: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
) -> None:
    member = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    monkeypatch.setattr(member, "_value_", replace(member.value, url=published))
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    result = cicada("prepare", *words)
    assert result.exit_code == 0, result.output
    model = Store(weights).open("resnet18")
    assert model.manifest.source == "pretrained:IMAGENET1K_V1"
    assert model.manifest.preset == "IMAGENET1K_V1"
    assert model.labels is not None
    assert "labels mean nothing" not in result.stdout


def test_a_download_that_fails_is_one_sentence_and_leaves_nothing(
    cicada: Cicada,
    weights: Path,
    free_port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    member = torchvision.models.ResNet18_Weights.IMAGENET1K_V1
    url = f"http://127.0.0.1:{free_port}/resnet18-00000000.pth"
    monkeypatch.setattr(member, "_value_", replace(member.value, url=url))
    monkeypatch.setattr(torch.hub, "_hub_dir", str(tmp_path / "hub"))
    result = cicada("prepare", "resnet18", "--pretrained")
    assert result.exit_code == 1
    assert result.stderr == f"cicada: {url} could not be downloaded: Connection refused\n"
    assert not weights.exists()


def saved_resnet18(path: Path, classes: int = 3) -> Path:
    torch.save(torchvision.models.resnet18(num_classes=classes).state_dict(), path)
    return path


def test_an_architecture_that_no_one_named_is_recognized(
    cicada: Cicada, weights: Path, tmp_path: Path
) -> None:
    result = cicada("prepare", "pets", "--checkpoint", saved_resnet18(tmp_path / "c.pth"))
    assert result.exit_code == 0, result.output
    assert "cicada: the keys and shapes are those of resnet18\n" in result.stderr
    assert rows(result.stdout)["architecture"] == "resnet18"
    assert Store(weights).open("pets").manifest.architecture == "resnet18"


def head_of_two(model: torchvision.models.ResNet) -> None:
    model.fc = torch.nn.Sequential(torch.nn.Linear(512, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def weighted_loss(model: torchvision.models.ResNet) -> None:
    """As a trainer module has it beside its model, a loss with the classes' weights."""
    model._register_state_dict_hook(
        lambda _module, state, _prefix, _metadata: (
            {f"net.{key}": tensor for key, tensor in state.items()}
            | {"criterion.weight": torch.ones(3)}
        )
    )


def without_a_block(model: torchvision.models.ResNet) -> None:
    del model.layer1[1]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (None, ("resnet50",), "it fits resnet18: give that as --architecture"),
        (
            None,
            ("pets", "--architecture", "vgg16"),
            "it fits resnet18: give that as --architecture",
        ),
        (
            head_of_two,
            ("resnet18",),
            "in the place of its linear layer fc the file has fc.0.weight, fc.0.bias, fc.2.weight",
        ),
        (
            head_of_two,
            ("pets",),
            "the nearest is resnet18, 6 keys apart: in the place of its linear layer fc the file has fc.0.w",
        ),
        (
            weighted_loss,
            ("pets", "--architecture", "resnet18"),
            "1 unexpected (criterion.weight); a --key that ends in net takes what is under it alone",
        ),
        (without_a_block, ("resnet18",), "10 missing (layer1.1.conv1.weight"),
        (None, ("pets", "--architecture", "resnet81"), "there is no architecture 'resnet81'"),
        (None, ("resnet18", "--key", "model"), "has nothing under 'model'"),
        (None, ("resnet18", "--preset", "V3"), "expected one of IMAGENET1K_V1"),
        (None, ("resnet18", "--std", "1,0,1"), "expected numbers above 0"),
        (None, ("resnet18", "--labels", "absent.txt"), "absent.txt: No such file"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_leaves_nothing_and_says_why(
    cicada: Cicada,
    weights: Path,
    tmp_path: Path,
    change: Callable[[torchvision.models.ResNet], None] | None,
    options: tuple[str, ...],
    message: str,
) -> None:
    model = torchvision.models.resnet18(num_classes=3)
    if change is not None:
        change(model)
    torch.save(model.state_dict(), tmp_path / "c.pth")
    result = cicada("prepare", *options, "--checkpoint", tmp_path / "c.pth")
    assert result.exit_code == 1
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert not weights.exists()


def test_values_that_the_chosen_type_cannot_hold_leave_nothing(
    cicada: Cicada, weights: Path, tmp_path: Path
) -> None:
    tensors = torchvision.models.resnet18(num_classes=3).state_dict()
    tensors["layer4.1.bn2.running_var"][5] = 70_000.0
    torch.save(tensors, tmp_path / "c.pth")
    arguments = ("prepare", "pets", "--checkpoint", tmp_path / "c.pth")
    result = cicada(*arguments, "--dtype", "float16")
    assert result.exit_code == 1
    assert "layer4.1.bn2.running_var has values that torch.float16 cannot hold" in result.stderr
    assert left_in(weights) == []
    assert cicada(*arguments, "--dtype", "bfloat16").exit_code == 0


def test_labels_of_one_s_own(cicada: Cicada, weights: Path, tmp_path: Path) -> None:
    words = ["猫", "naïve dog", "🦉"]
    (tmp_path / "pets.txt").write_text("\n".join(words) + "\n")
    arguments = ("prepare", "pets", "--checkpoint", saved_resnet18(tmp_path / "c.pth"))
    result = cicada(*arguments, "--labels", tmp_path / "pets.txt")
    assert result.exit_code == 0, result.output
    assert rows(result.stdout)["labels"] == "from pets.txt"
    assert Store(weights).open("pets").labels == tuple(words)
    assert "labels          猫, naïve dog, 🦉" in cicada("inspect", "pets").stdout
    (tmp_path / "pets.txt").write_text("cat\ndog\n")
    result = cicada(*arguments, "--labels", tmp_path / "pets.txt")
    assert result.exit_code == 1
    assert result.stderr == (
        f"cicada: {tmp_path}/pets.txt has 2 labels, expected 3: one for each class of the model\n"
    )
    assert Store(weights).open("pets").labels == tuple(words)


def test_preprocessing_of_one_s_own_is_kept_in_the_manifest(
    cicada: Cicada, weights: Path, tmp_path: Path
) -> None:
    options = ("--preset", "IMAGENET1K_V1", "--resize", "90x80", "--crop", "64", "--mean")
    more = (
        "0.5,0.4,0.3",
        "--std",
        "0.25,0.5,1",
        "--interpolation",
        "lanczos",
        "--dtype",
        "float16",
    )
    arguments = ("prepare", "pets", "--checkpoint", saved_resnet18(tmp_path / "c.pth"))
    result = cicada(*arguments, *options, *more)
    assert result.exit_code == 0, result.output
    manifest = Store(weights).open("pets").manifest
    assert manifest.input is not None
    assert manifest.input.model_dump() == {
        "resize": (90, 80),
        "crop": 64,
        "mean": (0.5, 0.4, 0.3),
        "std": (0.25, 0.5, 1.0),
        "interpolation": "lanczos",
        "antialias": True,
    }
    assert (manifest.preset, manifest.image_size, manifest.dtype) == ("own", 64, "F16")
    shown = json.loads(cicada("inspect", "pets", "--json").stdout)["models"][0]
    assert shown["input"]["resize"] == [90, 80]
    assert (shown["dtype"], shown["converted from"]) == ("F16", "F32")
    assert "resize 90 80, crop 64, mean 0.5 0.4 0.3" in cicada("inspect", "pets").stdout


def test_a_larger_crop_needs_more_memory_for_activations(cicada: Cicada, weights: Path) -> None:
    def activation_bytes(*options: str) -> int:
        cicada("prepare", "resnet18", "--random", "0", *options)
        return Store(weights).open("resnet18").manifest.activation_bytes

    assert activation_bytes("--crop", "448") == pytest.approx(4 * activation_bytes(), rel=0.01)


def test_inspect_shows_models_layers_and_faults(cicada: Cicada, weights: Path) -> None:
    assert "no model is prepared" in cicada("inspect").stdout
    cicada("prepare", "b", "--architecture", "resnet18", "--random", "0")
    cicada("prepare", "a", "--architecture", "resnet18", "--random", "1", "--format", "pth")
    model = Store(weights).open("b")
    lines = cicada("inspect").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", "a", "b"]
    assert lines[2].split()[:6] == ["b", model.version, "resnet18", "block", "safetensors", "1000"]
    assert lines[2].split()[-1] == "random:0"

    shown = cicada("inspect", "b").stdout
    assert re.search(r"^parameters +11689512 *$", shown, re.MULTILINE)
    assert "013-fc.safetensors" in shown
    document = json.loads(cicada("inspect", "b", "--json").stdout)
    layers = document["models"][0]["contents"]
    assert [layer["name"] for layer in layers[:3]] == ["conv1", "bn1", "relu"]
    assert layers[-1]["parameters"] == 512 * 1000 + 1000
    assert layers[-1]["bytes"] == (model.path / layers[-1]["file"]).stat().st_size

    assert cicada("inspect", "--verify").exit_code == 0
    path = model.path / layers[-1]["file"]
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\xff")
    assert cicada("inspect").exit_code == 0
    result = cicada("inspect", "b", "--verify")
    assert result.exit_code == 1
    assert "b: 013-fc.safetensors: has sha256" in result.stdout
    result = cicada("inspect", "--verify", "--json")
    assert result.exit_code == 1
    assert list(json.loads(result.stdout)["faults"]) == ["b"]

    (model.path / "manifest.json").write_text("{}")
    for arguments in (("inspect",), ("inspect", "b")):
        result = cicada(*arguments)
        assert result.exit_code == 1
        assert "manifest.json: was changed since it was prepared" in result.stdout
    assert cicada("inspect", "a", "--verify").exit_code == 0


def test_remove(cicada: Cicada, weights: Path) -> None:
    cicada("prepare", "resnet18", "--random", "0")
    assert cicada("remove", "resnet18").stdout == "removed resnet18\n"
    assert left_in(weights) == []


def test_the_folder_comes_from_the_environment_unless_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CICADA_WEIGHTS", str(tmp_path / "environment"))
    runner = CliRunner()
    assert str(tmp_path / "environment") in runner.invoke(app, ["inspect"]).stdout
    given = runner.invoke(app, ["inspect", "--weights", str(tmp_path / "given")])
    assert str(tmp_path / "given") in given.stdout


def start(weights: Path, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*CICADA, "prepare", *arguments, "--weights", str(weights)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_preparation_leaves_nothing(
    cicada: Cicada, weights: Path, number: signal.Signals
) -> None:
    cicada("prepare", "resnet18", "--random", "0")
    before = left_in(weights)
    with start(weights, "resnet18", "--architecture", "vgg11", "--random", "0") as process:
        wait_until(lambda: len(list(weights.glob(".versions/.new-*/*.safetensors"))) > 2)
        process.send_signal(number)
        assert process.stderr is not None
        errors = process.stderr.read()
    assert process.returncode == 128 + number
    assert b"Traceback" not in errors
    assert left_in(weights) == before


def test_a_killed_preparation_is_no_model_and_is_cleaned_up_by_the_next(
    cicada: Cicada, weights: Path
) -> None:
    with start(weights, "vgg11", "--random", "0") as process:
        wait_until(lambda: len(list(weights.glob(".versions/.new-*/*.safetensors"))) > 2)
        process.kill()
    assert Store(weights).names() == []
    assert len(list(weights.glob(".versions/.new-*"))) == 1
    cicada("prepare", "resnet18", "--random", "0")
    assert list(weights.glob(".versions/.new-*")) == []
    assert Store(weights).names() == ["resnet18"]


def test_several_processes_prepare_one_model_at_once(weights: Path) -> None:
    processes = [start(weights, "resnet18", "--random", seed) for seed in ("0", "0", "1", "2")]
    for process in processes:
        with process:
            assert process.wait(100) == 0
    store = Store(weights)
    assert store.verify("resnet18") == []
    assert len(store.versions("resnet18")) == 2
    assert list(weights.glob(".versions/.*-*")) == []


def test_the_bar_on_a_terminal_counts_bytes(weights: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*CICADA, "prepare", "vgg11", "--random", "0", "--weights", str(weights)]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        drawn = b""
        with suppress(OSError):  # EIO: the other end is closed
            while piece := os.read(ours, 65536):
                drawn += piece
    os.close(ours)
    assert process.returncode == 0
    shown = re.findall(rb"([0-9.]+)/([0-9.]+) MB", drawn)
    assert {total for _, total in shown} == {b"531.5"}
    assert len({done for done, _ in shown}) > 3


@pytest.mark.parametrize("weight_format", ["safetensors", "pth"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(
    cicada: Cicada, weights: Path, weight_format: str
) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        result = cicada("prepare", "resnet18", "--random", "0", "--format", weight_format)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith("File too large")
    assert left_in(weights) == []


def test_a_disk_that_is_too_small_is_known_beforehand(
    cicada: Cicada, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: argparse.Namespace(free=1000))
    result = cicada("prepare", "resnet18", "--random", "0")
    assert result.exit_code == 1
    assert "no space left for the model's 46796608 bytes, 1000 are free" in result.stderr
    assert not weights.exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 20 MB, for which the tests must run as root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "none", str(folder)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("weight_format", ["safetensors", "pth"])
def test_a_disk_that_fills_up_meanwhile_is_one_sentence_and_stays_as_it_was(
    small_disk: Path, weight_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: argparse.Namespace(free=1 << 40))
    words = ("prepare", "resnet18", "--random", "0", "--weights", str(small_disk / "weights"))
    result = CliRunner().invoke(app, [*words, "--format", weight_format])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith(": No space left on device")
    assert left_in(small_disk / "weights") == []


def test_a_store_that_may_not_be_written_is_one_sentence(cicada: Cicada, weights: Path) -> None:
    weights.mkdir(mode=0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        result = cicada("prepare", "resnet18", "--random", "0")
    finally:
        os.seteuid(user)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].endswith("Permission denied")
    weights.chmod(0o700)
    assert left_in(weights) == []


def test_an_optimized_model_says_so(cicada: Cicada, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimization, "_times", lambda *_: [[10.0], [8.0], [7.0], [7.5]])
    result = cicada("prepare", "resnet18", "--random", "0", "--optimize")
    assert result.exit_code == 0, result.output
    said = rows(result.stdout)
    assert said["execution"] == "fused, weights channels last: within 1e-4 of the largest logit"
    assert said["gain"].startswith("7.0 ms instead of 10.0, ")
    inspected = rows(cicada("inspect", "resnet18").stdout)
    assert inspected["execution"] == said["execution"]
    assert inspected["gain"] == said["gain"]
    assert cicada("inspect", "--verify").exit_code == 0


def test_what_is_not_faster_optimized_stays_as_it_is_and_says_so(
    cicada: Cicada, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimization, "_times", lambda *_: [[10.0], [10.0], [11.0], [12.0]])
    result = cicada("prepare", "resnet18", "--random", "0", "--optimize")
    assert result.exit_code == 0, result.output
    assert "nothing is faster here" in result.stderr
    assert rows(result.stdout)["execution"] == "as torchvision's, bit for bit"
    assert Store(weights).open("resnet18").manifest.optimization is None
