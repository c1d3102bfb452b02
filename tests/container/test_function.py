"""A function's own image: ours, and one prepared model inside, with the user's code and packages if it needs any."""

import json
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any, Final

import pytest
import torch
import torchvision
from PIL import Image

Docker = Callable[..., str]
Build = Callable[..., str]
Run = Callable[..., Any]

OWN: Final = {
    "net.py": """
        from einops import reduce
        from torch import nn

        from scoring.linear import Scoring

        class Net(nn.Module):
            def __init__(self, letters):
                super().__init__()
                self.letters = nn.Embedding(letters, 8)
                self.scoring = Scoring(8)

            def forward(self, ids):
                return self.scoring(reduce(self.letters(ids), "n letters width -> n width", "sum"))

        def make(letters): return Net(letters)
    """,
    "scoring/__init__.py": "",
    "scoring/linear.py": """
        from torch import nn

        class Scoring(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.out = nn.Linear(width, 2)

            def forward(self, value):
                return self.out(value)
    """,
    "models.py": """
        import torch
        from alphabet import LETTERS

        from handler.errors import InvalidInput

        def decode(body, content_type, parameters):
            ids = [LETTERS.find(letter) for letter in body.decode()]
            if not ids or min(ids) < 0:
                raise InvalidInput(f"expected letters of {LETTERS}")
            return torch.tensor([ids])

        def encode(outputs, parameters):
            return outputs[0].tolist()
    """,
    "requirements.txt": "einops>=0.8\n",
    "alphabet/pyproject.toml": """
        [build-system]
        requires = ["setuptools"]
        build-backend = "setuptools.build_meta"

        [project]
        name = "alphabet"
        version = "1.0"

        [tool.setuptools]
        py-modules = ["alphabet"]
    """,
    "alphabet/alphabet.py": "LETTERS = 'abcdefghij'\n",
}
"""A folder as users have them: a factory, a package beside it, a processing that is named as a package of ours, a
list of requirements, and a package to install."""
PREPARE: Final = (
    '--factory net.py:make --kwargs {"letters":10} --processing models.py '
    "--checkpoint net.pth --example 1x3:int64"
)
CODE: Final = "net.py models.py scoring"
PACKAGES: Final = "-r requirements.txt ./alphabet"


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


def layers(docker: Docker, image: str) -> list[str]:
    (described,) = json.loads(docker("image", "inspect", image))
    return list(described["RootFS"]["Layers"])


def test_above_our_image_it_has_the_model_and_nothing_else(
    docker: Docker, image: str, function: str, checkpoint: Path
) -> None:
    below, all_of_it = layers(docker, image), layers(docker, function)
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's folder, which only the user may read."""
    folder = tmp_path_factory.mktemp("own")
    for name, content in OWN.items():
        path = folder / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(dedent(content))
        path.chmod(0o600)
    generator = torch.Generator().manual_seed(4)
    state = {
        "letters.weight": torch.randn(10, 8, generator=generator),
        "scoring.out.weight": torch.randn(2, 8, generator=generator),
        "scoring.out.bias": torch.randn(2, generator=generator),
    }
    torch.save(state, folder / "net.pth")
    return folder


@pytest.fixture(scope="module")
def own_arguments(image: str, repository: Path) -> Callable[..., tuple[str, ...]]:
    """What `docker build` is told, without the folder."""

    def arguments(code: str = CODE, packages: str = PACKAGES) -> tuple[str, ...]:
        given = {"IMAGE": image, "MODEL": "letters", "PREPARE": PREPARE}
        given |= {"CODE": code, "PACKAGES": packages}
        return (
            *("--file", str(repository / "docker" / "function.Dockerfile")),
            *(word for name, value in given.items() for word in ("--build-arg", f"{name}={value}")),
        )

    return arguments


@pytest.fixture(scope="module")
def own_function(build: Build, own_arguments: Callable[..., tuple[str, ...]], folder: Path) -> str:
    return build("own-function", *own_arguments(), str(folder))


def test_with_code_and_packages_of_the_users_it_answers_as_their_model_does(
    run: Run, own_function: str, hardened: tuple[str, ...], folder: Path
) -> None:
    container = run(*hardened, "--user", "23456:0", image=own_function)
    container.wait_until_ready()
    answer = container.client.post("/invocations", content=b"cab")
    assert answer.status_code == 200, answer.text
    state = torch.load(folder / "net.pth", weights_only=True)
    summed = state["letters.weight"][[2, 0, 1]].sum(0)
    scores = state["scoring.out.weight"] @ summed + state["scoring.out.bias"]
    torch.testing.assert_close(torch.tensor(answer.json()), scores)

    refused = container.client.post("/invocations", content=b"xyz")
    assert (refused.status_code, refused.json()["error"]) == (400, "expected letters of abcdefghij")


def test_of_the_users_folder_it_has_the_code_and_in_one_layer(
    docker: Docker, run: Run, image: str, own_function: str
) -> None:
    assert len(layers(docker, own_function)) == len(layers(docker, image)) + 1
    container = run("--user", "23456:0", image=own_function)
    found = container.execute("find", "/function", "-type", "f", "-name", "*.*", "-readable")
    assert sorted(found.split()) == [
        *("/function/models.py", "/function/net.py"),
        *("/function/scoring/__init__.py", "/function/scoring/linear.py"),
    ]
    assert "torch" not in container.execute("find", "/packages", "-maxdepth", "4", "-name", "*")


@pytest.mark.parametrize(
    ("code", "packages", "reason"),
    [
        ("models.py", PACKAGES, "the factory /function/net.py: No such file"),
        ("net.py scoring", PACKAGES, "the processing /function/models.py: No such file"),
        ("net.py models.py", PACKAGES, "No module named 'scoring'"),
        (CODE, "./alphabet", "No module named 'einops'"),
        (CODE, "numpy<2", "conflict"),
    ],
)
def test_a_build_without_what_the_model_is_served_with_says_so(
    docker: Docker,
    own_arguments: Callable[..., tuple[str, ...]],
    folder: Path,
    code: str,
    packages: str,
    reason: str,
) -> None:
    given = own_arguments(code, packages)
    said = docker("build", "--force-rm", "--network", "host", *given, str(folder), check=False)
    assert reason in " ".join(said.replace("│", " ").split())
    assert "returned a non-zero code" in said


def test_a_volume_may_hold_the_code_too(docker: Docker, image: str, folder: Path) -> None:
    told = docker(
        "run", "--rm", "--user", "0:0", "--network", "none", "--volume", f"{folder}:/function:ro", image,
        "prepare", "scoring", "--factory", "scoring.linear:Scoring", "--kwargs", '{"width": 8}',
        "--example", "1x8", "--random", "0",
    )  # fmt: skip
    assert "scoring" in told
