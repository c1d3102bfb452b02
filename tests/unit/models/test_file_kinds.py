"""What a file is that is no checkpoint: each made here as its own tools make it."""

import gzip
import io
import json
import pickle
import random
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
import torchvision
from torch import nn

from models import checkpoint
from models.checkpoint import CheckpointError


def torchscript(path: Path) -> None:
    traced = torch.jit.trace(nn.Linear(2, 2), torch.ones(1, 2))  # type: ignore[no-untyped-call]
    torch.jit.save(traced, path)


def exported_program(path: Path) -> None:
    torch.export.save(
        torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),)), path.with_suffix(".pt2")
    )
    path.with_suffix(".pt2").rename(path)


def pickled_module(path: Path) -> None:
    torch.save(torchvision.models.resnet18(), path)


def pickled_module_legacy(path: Path) -> None:
    torch.save(torchvision.models.resnet18(), path, _use_new_zipfile_serialization=False)


def pickled_state_dict(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weight": torch.ones(2, 2)}))


def pickled_array(path: Path) -> None:
    path.write_bytes(pickle.dumps({"weight": np.ones((2, 2))}))


def exported_onnx(path: Path) -> None:
    pair = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [1]) for n in "ab"]
    node = onnx.helper.make_node("Relu", ["a"], ["b"])
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "graph", pair[:1], pair[1:]))
    path.write_bytes(model.SerializeToString())


def onnx_of_torch(path: Path) -> None:
    """The first fields of a ModelProto as torch writes them: ir_version 10, producer_name, its version."""
    path.write_bytes(b"\x08\x0a\x12\x07pytorch\x1a\x052.9.0\x3a\x10" + bytes(range(200)))


def saved_model(path: Path) -> None:
    path.write_bytes(b"\x08\x01\x12\x10" + bytes(range(200)))


def lite(path: Path) -> None:
    path.write_bytes(b"\x1c\0\0\0TFL3" + bytes(range(200)))


def lfs_pointer(path: Path) -> None:
    path.write_text(
        "version https://git-lfs.github.com/spec/v1\n"
        "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\n"
        "size 102540417\n"
    )


def web_page(path: Path) -> None:
    path.write_text("\n<!DOCTYPE html>\n<html><head><title>Google Drive - Quota exceeded</title>")


def commented_page(path: Path) -> None:
    path.write_text("<!-- saved -->\n<HTML lang=en><body>Sign in</body></HTML>")


def storage_refusal(path: Path) -> None:
    path.write_text(
        '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>'
    )


def json_answer(path: Path) -> None:
    path.write_text('{"message": "Not Found"}')


def sharded_index(path: Path) -> None:
    path.write_text(
        json.dumps({"metadata": {}, "weight_map": {"fc.weight": "model-1.safetensors"}})
    )


def hdf5(path: Path) -> None:
    path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))


def keras(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("metadata.json", "config.json", "model.weights.h5"):
            archive.writestr(name, "{}")


class Learner:
    """As fastai exports it: an object of its own with the model in it."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)


def exported_learner(path: Path) -> None:
    torch.save(Learner(), path)


def numpy_array(path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, np.ones(3))


def numpy_arrays(path: Path) -> None:
    with path.open("wb") as file:
        np.savez(file, weight=np.ones(3))


def zipped_checkpoint(path: Path) -> None:
    inner = io.BytesIO()
    torch.save({"weight": torch.ones(2, 2)}, inner)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.pth", inner.getvalue())


def empty_archive(path: Path) -> None:
    with zipfile.ZipFile(path, "w"):
        pass


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("model.pth"))


def gzipped(path: Path) -> None:
    path.write_bytes(gzip.compress(b"model" * 100))


def image(path: Path) -> None:
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(100))


def text(path: Path) -> None:
    path.write_text("conv1.weight 64 3 7 7\nbn1.weight 64\n")


def nothing(path: Path) -> None:
    path.touch()


def zeros(path: Path) -> None:
    path.write_bytes(bytes(100_000))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (nothing, "is empty"),
        (zeros, "begins with zeros alone, as of a download that did not finish"),
        (torchscript, "is TorchScript"),
        (exported_program, r"is an exported program \(torch\.export\)"),
        (
            pickled_module,
            r"holds a whole pickled module \(torchvision\.models\.resnet\.ResNet\), whose code is not run",
        ),
        (pickled_module_legacy, "holds a? ?whole pickled module"),
        (pickled_state_dict, "is a pickle with tensors, but not one that torch.save wrote"),
        (pickled_array, "is a pickle that torch.save did not write"),
        (exported_onnx, "is an ONNX model"),
        (onnx_of_torch, "is an ONNX model"),
        (saved_model, "is a TensorFlow SavedModel"),
        (lite, "is a TensorFlow Lite model"),
        (lfs_pointer, "is a Git LFS pointer instead of the file it stands for: `git lfs pull`"),
        (web_page, "is a web page"),
        (commented_page, "is a web page"),
        (storage_refusal, "is an XML document, as a storage service answers"),
        (json_answer, "is a JSON document"),
        (sharded_index, "is the index of a checkpoint in several files"),
        (hdf5, "is an HDF5 file, as Keras writes it"),
        (keras, "is a Keras model"),
        (exported_learner, r"holds a [\w.]*test_file_kinds\.Learner, expected a state dict"),
        (numpy_array, "is a NumPy array"),
        (numpy_arrays, "is an archive of NumPy arrays"),
        (zipped_checkpoint, r"is a zip archive of 1 files \(model\.pth\)"),
        (empty_archive, "is an empty zip archive"),
        (tar, "is application/x-tar"),
        (gzipped, "is application/gzip"),
        (image, "is image/png"),
        (text, "is text, which begins with 'conv1.weight 64 3 7 7'"),
    ],
)
@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_no_checkpoint_is_named(
    tmp_path: Path, make: Callable[[Path], None], message: str, name: str
) -> None:
    make(tmp_path / name)
    with pytest.raises(CheckpointError, match=message) as caught:
        checkpoint.read(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def zip_checkpoint(content: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(content, path)


def legacy_checkpoint(content: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (zip_checkpoint, "is cut short or damaged: a zip archive without the directory at its end"),
        (legacy_checkpoint, "it is cut short or damaged|it is cut short, as of half a download"),
        (safetensors.torch.save_file, "is cut short, as of half a download: it has"),
    ],
)
def test_half_a_download_is_named_wherever_it_ended(
    tmp_path: Path, save: Callable[[dict[str, torch.Tensor], Path], None], message: str
) -> None:
    save({f"layer{n}.weight": torch.ones(20, 20) for n in range(20)}, tmp_path / "whole")
    whole = (tmp_path / "whole").read_bytes()
    path = tmp_path / "half"
    chance = random.Random(0)
    for _ in range(40):
        path.write_bytes(whole[: chance.randrange(200, len(whole) - 1)])
        with pytest.raises(CheckpointError, match=message) as caught:
            checkpoint.read(path)
        assert "\n" not in str(caught.value)
