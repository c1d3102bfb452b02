"""Log lines: one JSON object each."""

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final, TextIO

_OWN: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "color_message"}


class JsonFormatter(logging.Formatter):
    """time, level, event, whatever was given as `extra`, and a traceback where there is one.

    always: fields that every line has.
    """

    def __init__(self, **always: Any) -> None:
        super().__init__()
        self._always = always

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage().strip(),
            **self._always,
        }
        line |= {name: value for name, value in vars(record).items() if name not in _OWN}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str, stream: TextIO, **always: Any) -> None:
    """Sends all log lines, and the warnings that Python's libraries give, to `stream`."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter(**always))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    logging.captureWarnings(capture=True)
