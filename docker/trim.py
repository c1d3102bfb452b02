"""Takes from the image's environment what a service on the CPU never loads, and what nobody but a developer does.

To be run by that environment's own interpreter, while the image is built. With CPU-only wheels little is left to do;
PyPI's torch brings CUDA's libraries. Some of them it is linked against, and those must stay; the others it would
load on a GPU.
"""

import importlib.metadata
import shutil
import sysconfig
from pathlib import Path
from typing import Final

PACKAGES: Final = Path(sysconfig.get_path("purelib"))
COMPILERS: Final = ("triton",)
"""For `torch.compile`, which nothing here uses."""
SOURCES: Final = ("a", "h", "hpp", "pxd", "pxi", "pyi", "pyx")
"""What a type checker or a compiler reads."""


def loaded() -> set[Path]:
    """The shared libraries that a process has mapped which has loaded all that a handler loads."""
    import safetensors.torch  # noqa: F401, PLC0415
    import torch  # noqa: PLC0415
    import torchvision.models  # noqa: F401, PLC0415

    torch.ones(8).sum()
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    return {Path(line.split(maxsplit=5)[5]).resolve() for line in maps.splitlines() if "/" in line}


def remove_distribution(name: str) -> None:
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for command in [file for file in files if file.parts[0] == ".."]:
        (PACKAGES / command).unlink(missing_ok=True)
    for top in {file.parts[0] for file in files} - {".."}:
        shutil.rmtree(PACKAGES / top, ignore_errors=True)


def main() -> None:
    for name in COMPILERS:
        remove_distribution(name)
    for pattern in ("torch/include", "nvidia/**/include", "**/tests"):
        for folder in list(PACKAGES.glob(pattern)):
            shutil.rmtree(folder, ignore_errors=True)
    for source in [file for kind in SOURCES for file in PACKAGES.rglob(f"*.{kind}")]:
        source.unlink()
    for compiler in PACKAGES.glob("torch/bin/protoc*"):
        compiler.unlink()
    needed = loaded()
    for library in [*PACKAGES.glob("nvidia/**/*.so*"), *PACKAGES.glob("torch/lib/*cuda_linalg*")]:
        if library.resolve() not in needed:
            library.unlink()


if __name__ == "__main__":
    main()
