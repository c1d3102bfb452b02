"""What a measurement was made on: written into every file of figures."""

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import psutil

_PACKAGES: Final = ("torch", "torchvision", "numpy", "safetensors", "pillow", "fastapi", "uvicorn")


def describe(threads: int, command: str) -> dict[str, Any]:
    """Machine, versions, threads and command; a dictionary of plain values."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "threads": threads,
        "versions": {name: version(name) for name in _PACKAGES},
    }


def columns(described: Mapping[str, Any], cache: str) -> dict[str, Any]:
    """The same as columns of a table, and how the page cache was."""
    return {
        "date": described["date"],
        "processor": described["processor"],
        "cores": described["cores"],
        "threads": described["threads"],
        "versions": " ".join(f"{key}={value}" for key, value in described["versions"].items()),
        "cache": cache,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
