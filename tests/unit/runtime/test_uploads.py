"""What the bodies of all requests under way may take together."""

import pytest

from runtime import uploads
from runtime.errors import BodiesFull
from runtime.requests import Record
from runtime.settings import Settings
from runtime.uploads import Uploads

MB = 1 << 20


def test_bodies_count_together_until_their_requests_end() -> None:
    held = Uploads(100)
    first, second = Record("first"), Record("second")
    held.hold(first, 60)
    held.hold(second, 40)
    with pytest.raises(BodiesFull, match="CICADA_BODIES_BYTES") as full:
        held.hold(second, 1)
    assert full.value.headers.keys() == {"Retry-After", "Connection"}
    held.release(first)
    held.hold(second, 60)
    held.release(second)
    held.release(second)
    assert held.held == 0


def test_the_limit_is_a_quarter_of_memory_and_room_for_two_bodies_at_least() -> None:
    settings = Settings(max_body_bytes=32 * MB)
    assert uploads.limit(settings, 1024 * MB) == 256 * MB
    assert uploads.limit(settings, 128 * MB) == 64 * MB
    assert uploads.limit(settings, None) == 64 * MB
    assert uploads.limit(Settings(bodies_bytes=7), 1024 * MB) == 7
