"""torchvision's constructor on the meta device, `torch.load(mmap=True)`, `load_state_dict(assign=True)`."""

from pathlib import Path

import torch
from torch import Tensor

from bench import stand_in
from models import catalog


def make(architecture: str, checkpoints: Path) -> stand_in.Contender:
    path = checkpoints / "checkpoint.pth"

    def load_and_run(value: Tensor) -> Tensor:
        with torch.device("meta"):
            model = catalog.torchvision_model(architecture)
        model.load_state_dict(torch.load(path, mmap=True, weights_only=True), assign=True)
        logits: Tensor = model(value)
        return logits

    return load_and_run


if __name__ == "__main__":
    stand_in.serve(make)
