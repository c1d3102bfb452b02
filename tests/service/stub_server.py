"""The service over stub handlers as a process of its own; its URL is the first line that it prints."""

import argparse
import socket
import sys
from pathlib import Path

import uvicorn

from runtime.app import create_app
from runtime.settings import Settings

STUB = Path(__file__).with_name("stub_handler.py")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, required=True)
    arguments = parser.parse_args()
    app = create_app(Settings(weights=arguments.weights), command=[sys.executable, str(STUB)])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        config = uvicorn.Config(
            app, loop="uvloop", http="httptools", log_config=None, server_header=False
        )
        uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
