"""Starts a handler in a control group: the group is joined before torch is loaded, so that all of it counts there.

`python -m bench.paper.entry --socket-fd N [--group DIR] [--scheduler off] [--bytes-per-s N] -- HANDLER'S ARGUMENTS`
"""

import sys
from pathlib import Path

from bench.control_groups import Group


def without_group(arguments: list[str]) -> list[str]:
    """Joins the group that the arguments name, if they do; what is left is for others."""
    if "--group" not in arguments:
        return arguments
    position = arguments.index("--group")
    Group(Path(arguments[position + 1]), "").join()
    return arguments[:position] + arguments[position + 2 :]


if __name__ == "__main__":
    ours = without_group(sys.argv[1:])
    from bench.paper import variant  # loads torch

    variant.main(ours)
