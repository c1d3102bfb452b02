"""Models of the user's: from a factory and a checkpoint to a prepared model, or to the reason why not."""

import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models import own, preparation
from models.checkpoint import CheckpointError
from models.errors import ModelError
from models.general import Unsuitable
from models.manifest import WeightFormat
from models.own import OptionsError
from models.store import PreparedModel, Store

pytestmark = pytest.mark.usefixtures("imports_are_undone")

MODEL = dedent("""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self, width, classes=3):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())
            self.head = nn.Linear(width, classes)
            self.register_buffer("steps", torch.arange(4), persistent=False)

        def forward(self, value):
            return self.head(self.body(value).mean((2, 3)))

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(9, 4)
            self.out = nn.Linear(4, 9, bias=False)
            self.out.weight = self.words.weight

        def forward(self, ids, mask):
            states = self.words(ids) * mask.unsqueeze(-1)
            return {"scores": self.out(states), "states": (states, states.sum(1))}

    class Noisy(Net):
        def forward(self, value):
            return super().forward(value) + torch.rand(1)

    class Random(Net):
        def __init__(self):
            super().__init__(4)
            self.offset = torch.rand(3)

        def forward(self, value):
            return super().forward(value) + self.offset

    class InPlace(Net):
        def forward(self, value):
            return super().forward(value.add_(1))

    class HalfInside(Net):
        def __init__(self, width):
            super().__init__(width)
            self.body.bfloat16()

        def forward(self, value):
            return self.head(self.body(value.bfloat16()).mean((2, 3)).float())

    class Scale(nn.Module):
        def __init__(self, width, std):
            super().__init__()
            self.factors = nn.Parameter(torch.empty(width))
            self.reset_parameters(std)

        def reset_parameters(self, std):
            nn.init.normal_(self.factors, std=std)

        def forward(self, value):
            return value * self.factors

    class Scaled(Net):
        def __init__(self, width):
            super().__init__(width)
            self.scale = Scale(3, std=0.1)

        def forward(self, value):
            return self.scale(super().forward(value))

    class Exits(Net):
        def forward(self, value):
            raise SystemExit("enough")

    class Resets(nn.Module):
        def __init__(self, error):
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(3))
            self.error = error

        def reset_parameters(self):
            raise self.error

        def forward(self, value):
            return value + self.offset

    class NoTensor(Net):
        def forward(self, value):
            return super().forward(value).tolist()

    class Needy(Net):
        def forward(self, value):
            return dict(self.named_modules())["body.0"](value) + self.nothing

    class Hollow(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(3, 2)
            self.more = nn.Parameter(torch.empty(0, 3))
            self.register_buffer("seen", torch.empty(2, 0))

        def forward(self, value):
            return self.out(torch.cat([value, self.more])) + self.seen.sum()

    def double(): return Net(4).double()
    def pair(): return Pair()
    def noisy(): return Noisy(4)
    def number(): return 5
    def exiting(): raise SystemExit(0)
    def resetting(width): return nn.Sequential(Net(width), Resets(SystemExit("no more")))
    def growing(width):
        return nn.Sequential(Net(width), Resets(RuntimeError("Allocator: can't allocate memory")))
    def importing():
        from models.net import Net
""")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.py"
    path.write_text(MODEL)
    return path


def user_class(file: Path, name: str) -> type[nn.Module]:
    space: dict[str, type[nn.Module]] = {}
    exec(file.read_text(), space)  # noqa: S102 - the test's own text
    return space[name]


def saved(path: Path, module: nn.Module) -> Path:
    torch.save(module.state_dict(), path)
    return path


def prepared(tmp_path: Path, source: preparation.Source) -> PreparedModel:
    return preparation.prepare(Store(tmp_path / "store"), "mine", source, "safetensors")


def save_legacy(content: dict[str, Tensor], path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("weight_format", ["safetensors", "pth"])
@pytest.mark.parametrize("save", [torch.save, save_legacy, save_file])
def test_tensors_without_elements_are_kept(
    file: Path, tmp_path: Path, save: Callable[[Any, Path], None], weight_format: WeightFormat
) -> None:
    plain = user_class(file, "Hollow")().eval()
    save(plain.state_dict(), tmp_path / "file")
    source = preparation.from_factory(
        f"{file}:Hollow", {}, "2x3", "block", checkpoint_file=tmp_path / "file"
    )
    store = Store(tmp_path / "store")
    model = preparation.prepare(store, "mine", source, weight_format)
    entries = [entry for layer in model.manifest.layers for entry in layer.parameters]
    assert {entry.name: entry.shape for entry in entries} == {
        key: tuple(tensor.shape) for key, tensor in plain.state_dict().items()
    }
    assert store.verify("mine") == []


def test_a_factorys_model_is_prepared_with_a_checkpoints_weights(
    file: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = user_class(file, "Net")(width=5).eval()
    checkpoint = saved(tmp_path / "net.pth", plain)
    source = preparation.from_factory(
        f"{file}:Net", {"width": 5}, "1x3x32x32", "block", checkpoint_file=checkpoint
    )
    manifest = prepared(tmp_path, source).manifest

    assert manifest.factory is not None
    assert manifest.factory.target == f"{file}:Net"
    assert manifest.options == {"width": 5}
    assert manifest.source == "checkpoint:net.pth"
    assert [(spec.name, spec.shape) for spec in manifest.outputs] == [("output", (1, 3))]
    assert manifest.classes == 3, "by its form it classifies images"
    assert manifest.input is not None
    assert manifest.input.crop == manifest.image_size == 32
    assert manifest.labels is None
    assert manifest.activation_bytes > 3 * 32 * 32 * 4

    chain = own.recorded(manifest)
    layers = [layer.build() for layer in chain.layers]
    for built in layers:
        built.bind(plain.state_dict())
    image = torch.randn(2, 3, 20, 20, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        assert torch.equal(chain.forward(layers, image), plain(image))


def test_a_forward_may_change_its_input(file: Path, tmp_path: Path) -> None:
    plain = user_class(file, "InPlace")(width=5).eval()
    checkpoint = saved(tmp_path / "net.pth", plain)
    source = preparation.from_factory(
        f"{file}:InPlace", {"width": 5}, "1x3x8x8", "block", checkpoint_file=checkpoint
    )
    manifest = prepared(tmp_path, source).manifest
    assert [(spec.name, spec.shape) for spec in manifest.outputs] == [("output", (1, 3))]


@pytest.mark.parametrize(
    ("factory", "options", "example", "dtype"),
    [
        ("Net", {"width": 4}, "1x3x8x8", "F32"),
        ("double", {}, "1x3x8x8:float64", "F64"),
        ("HalfInside", {"width": 16}, "1x3x8x8", "BF16"),
    ],
)
def test_the_manifest_has_the_type_of_most_weights(
    file: Path, tmp_path: Path, factory: str, options: dict[str, Any], example: str, dtype: str
) -> None:
    made = user_class(file, factory)(**options)
    source = preparation.from_factory(
        f"{file}:{factory}",
        options,
        example,
        "block",
        checkpoint_file=saved(tmp_path / "net.pth", made),
    )
    manifest = prepared(tmp_path, source).manifest
    assert manifest.dtype == dtype
    assert manifest.found_dtypes == (), "none was converted"
    assert manifest.classes == (0 if factory == "double" else 3)
    assert own.recorded(manifest).dtype == torch.float32, "images come as in the example"


def test_a_checkpoint_of_another_type_is_recorded(file: Path, tmp_path: Path) -> None:
    half = user_class(file, "Net")(width=4).half()
    source = preparation.from_factory(
        f"{file}:Net",
        {"width": 4},
        "1x3x8x8",
        "block",
        checkpoint_file=saved(tmp_path / "half.pth", half),
    )
    manifest = prepared(tmp_path, source).manifest
    assert (manifest.dtype, manifest.found_dtypes) == ("F32", ("F16",))


def test_of_several_types_in_a_checkpoint_those_converted_are_recorded(
    file: Path, tmp_path: Path
) -> None:
    inside = user_class(file, "HalfInside")(width=16)  # its body's are kept in bfloat16
    inside.head.half()
    source = preparation.from_factory(
        f"{file}:HalfInside",
        {"width": 16},
        "1x3x8x8",
        "block",
        checkpoint_file=saved(tmp_path / "half.pth", inside),
    )
    assert source.found_dtypes == ("F16",)


def test_what_of_a_checkpoint_is_no_number_is_kept_and_reported(file: Path, tmp_path: Path) -> None:
    state = user_class(file, "Net")(width=4).state_dict()
    state["head.bias"][1] = torch.nan
    torch.save({**state, "epoch": 3}, tmp_path / "net.pth")
    source = preparation.from_factory(
        f"{file}:Net", {"width": 4}, "1x3x8x8", "block", checkpoint_file=tmp_path / "net.pth"
    )
    prepared(tmp_path, source)
    assert list(source.findings.sentences()) == [
        "left out, since they are no tensors: epoch (int)",
        "NaN or infinite, so that answers may be: head.bias (1 values)",
    ]


@pytest.mark.parametrize("keys", ["both", "first", "second"])
def test_tied_weights_may_stand_in_the_checkpoint_under_any_of_their_names(
    file: Path, tmp_path: Path, keys: str
) -> None:
    torch.manual_seed(0)
    state = {key: tensor.clone() for key, tensor in user_class(file, "Pair")().state_dict().items()}
    if keys != "both":
        del state["out.weight" if keys == "first" else "words.weight"]
    save_file(state, tmp_path / "pair.safetensors")
    source = preparation.from_factory(
        f"{file}:pair",
        {},
        "ids=2x3:int64,mask=2x3",
        "block",
        checkpoint_file=tmp_path / "pair.safetensors",
    )
    manifest = prepared(tmp_path, source).manifest
    stored = [tensor.name for layer in manifest.layers for tensor in layer.parameters]
    assert stored == ["words.weight"], "once"
    assert [spec.name for spec in manifest.outputs] == ["scores", "states.0", "states.1"]
    assert (manifest.input, manifest.classes) == (None, 0)


def test_tied_weights_that_differ_in_the_checkpoint_are_refused(file: Path, tmp_path: Path) -> None:
    state = {key: tensor.clone() for key, tensor in user_class(file, "Pair")().state_dict().items()}
    state["out.weight"] += 1
    torch.save(state, tmp_path / "pair.pth")
    with pytest.raises(CheckpointError, match=r"different values under words\.weight and out\.wei"):
        preparation.from_factory(
            f"{file}:pair",
            {},
            "ids=2x3:int64,mask=2x3",
            "block",
            checkpoint_file=tmp_path / "pair.pth",
        )


def test_a_buffer_that_state_dicts_no_longer_have_may_stand_in_an_old_checkpoint(
    file: Path, tmp_path: Path
) -> None:
    plain = user_class(file, "Net")(width=4)

    def prepare(steps: Tensor) -> preparation.Source:
        torch.save(plain.state_dict() | {"steps": steps}, tmp_path / "old.pth")
        return preparation.from_factory(
            f"{file}:Net",
            {"width": 4},
            "1x3x8x8",
            "block",
            checkpoint_file=tmp_path / "old.pth",
        )

    assert "steps" not in prepare(torch.arange(4)).weights
    with pytest.raises(CheckpointError, match=r"1 unexpected \(steps\)"):
        prepare(torch.arange(4) + 1)


@pytest.mark.parametrize(
    ("factory", "example", "reason"),
    [
        ("noisy", "1x3x8x8", "gives other outputs each time for one input"),
        ("Random", "1x3x8x8", "gives other outputs than the plain module"),
        ("number", "1x3x8x8", "models.py:number gives a int, expected a torch.nn.Module"),
        ("Net", "1x3x8x8", "the factory .*models.py:Net fails: TypeError: .*width"),
        ("pair", "1x3x8x8", "its forward fails on the example .*input .1, 3, 8, 8. F32.*TypeError"),
        ("importing", "1x3x8x8", "fails: ModuleNotFoundError: .*; if models is a package of yours"),
        ("exiting", "1x3x8x8", "the factory .*models.py:exiting fails: SystemExit: 0"),
        ("absent", "1x3x8x8", "has nothing named absent, expected a function"),
    ],
)
def test_what_cannot_be_served_is_refused_at_preparation_with_the_reason(
    file: Path, factory: str, example: str, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        preparation.from_factory(f"{file}:{factory}", {}, example, "block", seed=1)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("NoTensor", "its forward gives no tensor"),
        ("Needy", "its forward fails"),
        ("Exits", "its forward fails on the example .*: SystemExit: enough"),
        ("Scaled", "layer .* its reset_parameters fails: TypeError: .*'std'"),
        ("resetting", "layer .* its reset_parameters fails: SystemExit: no more"),
    ],
)
def test_a_module_that_gives_no_tensor_or_fails_is_refused(
    file: Path, name: str, reason: str
) -> None:
    with pytest.raises(Unsuitable, match=reason):
        preparation.from_factory(f"{file}:{name}", {"width": 4}, "1x3x8x8", "block", seed=1)


def test_that_no_memory_is_left_for_initializing_it_is_not_said_to_be_the_modules_fault(
    file: Path,
) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        preparation.from_factory(f"{file}:growing", {"width": 4}, "1x3x8x8", "block", seed=1)


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "is not JSON"), ("[1]", "expected a JSON object"), ("3", "object")]
)
def test_keyword_arguments_are_a_json_object(text: str, reason: str) -> None:
    with pytest.raises(OptionsError, match=reason):
        own.keywords(text)
    assert own.keywords('{"width": 5}') == {"width": 5}
    assert own.keywords(None) == {}


def test_what_is_missing_of_the_code_where_the_model_lies_is_found(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needed.py").write_text("VALUE = 1\n")
    processing = tmp_path / "speech.py"
    processing.write_text("import needed\ndef decode(*_): ...\ndef encode(*_): ...\n")
    source = preparation.from_factory(f"{file}:Net", {"width": 4}, "1x3x8x8", "block", seed=1)
    manifest = prepared(tmp_path, preparation.with_processing(source, str(processing))).manifest
    assert list(own.findings(manifest)) == []

    for name in [name for name in sys.modules if name == "needed" or "cicada_user" in name]:
        monkeypatch.delitem(sys.modules, name)  # as in another process
    (tmp_path / "needed.py").unlink()
    file.write_text(MODEL + "\n")
    missing = "cannot be imported: ModuleNotFoundError: No module named 'needed'"
    assert list(own.findings(manifest)) == [
        f"the processing {processing} {missing}",
        f"the factory {file} was changed since the model was prepared with it",
    ]


def test_of_a_package_the_distribution_is_recorded_and_another_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, metadata = tmp_path / "speech", tmp_path / "nice_speech-1.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text(MODEL + "\ndef decode(*_): ...\ndef encode(*_): ...\n")
    (metadata / "top_level.txt").write_text("speech\n")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nice-speech\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    source = preparation.from_factory("speech:Net", {"width": 4}, "1x3x8x8", "block", seed=1)
    manifest = prepared(tmp_path, preparation.with_processing(source, "speech")).manifest
    assert manifest.factory is not None
    assert manifest.factory.distribution == "nice-speech 1.0"
    assert list(own.findings(manifest)) == []

    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nice-speech\nVersion: 1.1\n")
    changed = "was of nice-speech 1.0 when the model was prepared, found nice-speech 1.1"
    assert list(own.findings(manifest)) == [
        f"the processing speech {changed}",
        f"the factory speech:Net {changed}",
    ]


def test_a_processing_must_have_both_functions(file: Path, tmp_path: Path) -> None:
    source = preparation.from_factory(f"{file}:Net", {"width": 4}, "1x3x8x8", "block", seed=1)
    half = tmp_path / "half.py"
    half.write_text("def decode(body, content_type, parameters): ...\n")
    with pytest.raises(ModelError, match=r"the processing .*half\.py has nothing named encode"):
        preparation.with_processing(source, str(half))
    half.write_text("def decode(*_): ...\ndef encode(*_): ...\n")
    other = tmp_path / "whole.py"
    other.write_text(half.read_text())
    recorded = preparation.with_processing(source, str(other)).processing
    assert recorded is not None
    assert (recorded.target, len(recorded.sha256 or "")) == (str(other), 64)
