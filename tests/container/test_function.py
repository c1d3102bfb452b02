"""A function's own image: ours, and one prepared model inside."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image

Docker = Callable[..., str]
Run = Callable[..., Any]


def test_it_serves_its_model_and_needs_nothing_else(
    run: Run, function: str, hardened: tuple[str, ...], photo: Path, checkpoint: Path
) -> None:
    container = run(*hardened, "--user", "23456:0", image=function)
    container.wait_until_ready()
    answer = container.client.post("/invocations?top=102", content=photo.read_bytes())
    assert answer.status_code == 200
    found = {row["index"]: row["probability"] for row in answer.json()}
    torch.testing.assert_close(
        torch.tensor([found[index] for index in range(102)]), expected(checkpoint, photo)
    )


def expected(checkpoint: Path, photo: Path) -> torch.Tensor:
    """torchvision's own probabilities with that checkpoint."""
    model = torchvision.models.resnet18(weights=None, num_classes=102).eval()
    model.load_state_dict(torch.load(checkpoint, weights_only=True))
    preset = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    with Image.open(photo) as image, torch.inference_mode():
        logits: torch.Tensor = model(preset(image).unsqueeze(0))
    return logits.softmax(1).squeeze(0)


def test_above_our_image_it_has_the_model_and_nothing_else(
    docker: Docker, image: str, function: str, checkpoint: Path
) -> None:
    def layers(name: str) -> list[str]:
        (described,) = json.loads(docker("image", "inspect", name))
        return list(described["RootFS"]["Layers"])

    below, all_of_it = layers(image), layers(function)
    assert all_of_it[: len(below)] == below
    assert len(all_of_it) == len(below) + 1
    sizes = docker("history", "--format", "{{.Size}}", "--human=false", function).split()
    assert max(map(int, sizes[:4])) < 1.1 * checkpoint.stat().st_size


def test_a_build_without_a_model_says_so(
    docker: Docker, image: str, repository: Path, checkpoint: Path
) -> None:
    said = docker(
        "build",
        "--force-rm",
        "--file", str(repository / "docker" / "function.Dockerfile"),
        "--build-arg", f"IMAGE={image}",
        str(checkpoint.parent),
        check=False,
    )  # fmt: skip
    assert "MODEL" in said
    assert "is not set" in said
