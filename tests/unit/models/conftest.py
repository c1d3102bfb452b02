"""What the tests of models share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def imports_are_undone(tmp_path: Path) -> Iterator[None]:
    """A user's module is one per process and file; the next test's has the same name and other contents.

    What torch imports meanwhile stays: not all of it can be imported twice.
    """
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(f"{tmp_path}/"):
            del sys.modules[name]
