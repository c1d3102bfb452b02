"""`cicada serve` with stub handlers in the place of real ones: all of the proxy, and no torch."""

import sys
from pathlib import Path

from runtime.server import serve
from runtime.settings import Settings

if __name__ == "__main__":
    serve(Settings(), command=[sys.executable, str(Path(__file__).with_name("stub_handler.py"))])
