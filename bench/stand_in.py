"""A process that answers a handler's frames with something else than Cicada: the floor, or a peer."""

import argparse
import ctypes
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

import numpy as np
import torch
from torch import Tensor

from handler import wire
from handler.timeline import now_ns

_PR_SET_PDEATHSIG: Final = 1


class Contender(Protocol):
    """What is measured: everything from the input in memory to the logits in memory."""

    def __call__(self, value: Tensor) -> Tensor: ...


def serve(make: Callable[[str, Path], Contender]) -> None:
    """Answers each request with its logits and its duration, until the socket closes.

    A request may name another architecture, which is then made from what lies in the folder, and kept.

    make: given the architecture and the folder of checkpoints, what to measure.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket-fd", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--architecture", required=True)
    parser.add_argument("--checkpoints", type=Path, required=True)
    arguments = parser.parse_args()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(arguments.threads)
    connection = socket.socket(fileno=arguments.socket_fd)
    contenders = {arguments.architecture: make(arguments.architecture, arguments.checkpoints)}
    wire.send(connection, {"type": "ready"})
    while (frame := wire.receive(connection)) is not None:
        header, body = frame
        name = header.get("architecture", arguments.architecture)
        if name not in contenders:
            contenders[name] = make(name, arguments.checkpoints)
        floats = torch.from_numpy(np.frombuffer(body, dtype="<f4")) if body else torch.empty(0)
        value = floats.reshape(header["input"]["shape"])
        with torch.inference_mode():
            start = now_ns()
            logits = contenders[name](value)
            duration_ns = now_ns() - start
        content = logits.contiguous().numpy().tobytes()
        del logits
        wire.send(connection, {"type": "result", "duration_ms": duration_ns / 1e6}, content)
