"""ONNX Runtime: external data mapped, prepacking off, initializers used where they lie."""

from pathlib import Path

import onnxruntime
import torch
from torch import Tensor

from bench import stand_in


def make(architecture: str, checkpoints: Path) -> stand_in.Contender:
    path = checkpoints / f"{architecture}.onnx"
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "0")
    options.add_session_config_entry("session.use_ort_model_bytes_for_initializers", "1")

    def load_and_run(value: Tensor) -> Tensor:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        (logits,) = session.run(None, {"input": value.numpy()})
        return torch.from_numpy(logits)

    return load_and_run


if __name__ == "__main__":
    stand_in.serve(make)
