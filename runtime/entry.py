"""Where the `cicada` command starts: before anything is loaded, the service can be told to end.

The kernel gives a container's first process no signal that it has not asked for. What loads the command takes a
moment in which SIGTERM would be lost, and the container killed only when its platform has waited long enough.
"""

import sys

from runtime import signals


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        signals.end_at_once()
    from runtime.cli import main as run  # noqa: PLC0415

    run()
