"""The floor: torchvision's model kept in memory, a forward pass per request."""

from pathlib import Path

import torch
from torch import Tensor

from bench import stand_in
from handler import memory
from models import catalog


def make(architecture: str, checkpoints: Path) -> stand_in.Contender:
    model = catalog.torchvision_model(architecture)
    model.load_state_dict(torch.load(checkpoints / "checkpoint.pth", weights_only=True))
    memory.give_back()  # what loading left free would hide what the forward pass takes

    def forward(value: Tensor) -> Tensor:
        logits: Tensor = model(value)
        return logits

    return forward


if __name__ == "__main__":
    stand_in.serve(make)
