"""The service's log: JSON lines on standard output, and what of the libraries' own is left out."""

import logging
import sys

from handler import loglines


def configure(level: str) -> None:
    loglines.configure(level.upper(), sys.stdout)
    # uvicorn tells at "info" what the service says itself, in its own words.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
