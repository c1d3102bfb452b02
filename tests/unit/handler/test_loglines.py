import io
import json
import logging
import warnings
from collections.abc import Iterator

import pytest

from handler import loglines


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    written = io.StringIO()
    loglines.configure("INFO", written, process="handler", pid=5)
    yield written
    logging.captureWarnings(capture=False)
    root.handlers[:], level = before
    root.setLevel(level)


def test_a_line_is_an_object_with_what_was_given(stream: io.StringIO) -> None:
    logging.getLogger("a").info("handler ready", extra={"start_ms": 1.5, "path": object})
    logging.getLogger("a").debug("not this one")
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"], line["start_ms"]) == ("handler ready", "info", 1.5)
    assert (line["process"], line["pid"]) == ("handler", 5)
    assert line["path"] == "<class 'object'>"


def test_a_traceback_and_a_warning_stay_on_their_line(stream: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("a").exception("failed\r\nbadly")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("a library's\nown", stacklevel=1)
    failed, warned = (json.loads(line) for line in stream.getvalue().splitlines())
    assert failed["event"] == "failed\r\nbadly"
    assert failed["traceback"].endswith("ValueError: two\nlines")
    assert "a library's\nown" in warned["event"]
