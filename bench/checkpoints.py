"""The files that the floor and the peers load: one random model in each of their forms."""

from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from models import catalog
from models.blueprint import structure_only
from models.random_weights import RandomWeights


def write_pth(folder: Path, architecture: str, seed: int) -> dict[str, Tensor]:
    """Writes `checkpoint.pth`, all that the floor needs; returns the weights."""
    folder.mkdir(parents=True)
    with structure_only():
        weights = catalog.torchvision_model(architecture).state_dict()  # which knows its version
    weights.update(RandomWeights(catalog.architecture(architecture), seed))
    torch.save(weights, folder / "checkpoint.pth")
    return weights


def write(folder: Path, architecture: str, seed: int, *, onnx: bool) -> None:
    """Writes `checkpoint.pth`, `checkpoint.safetensors` and, if asked, `ARCHITECTURE.onnx` with its data."""
    weights = write_pth(folder, architecture, seed)
    safetensors.torch.save_file(weights, folder / "checkpoint.safetensors")
    if onnx:
        side = catalog.usual_image_size(architecture)
        model = catalog.torchvision_model(architecture)
        model.load_state_dict(weights)
        torch.onnx.export(
            model,
            (torch.zeros(1, 3, side, side),),
            folder / f"{architecture}.onnx",
            input_names=["input"],
            dynamo=True,
            external_data=True,
            verbose=False,
        )
