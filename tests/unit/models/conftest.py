"""What the tests of models share."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def imports_are_undone() -> Iterator[None]:
    """A user's module is one per process and file; the next test's has the same name and other contents."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]
