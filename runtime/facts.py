"""What there is to tell of a prepared model: `cicada inspect` prints it, `/models` answers with it."""

from typing import Any

from models.manifest import LayerEntry, Optimization
from models.store import PreparedModel


def model_facts(model: PreparedModel) -> dict[str, Any]:
    manifest = model.manifest
    return {
        "name": model.name,
        "version": model.version,
        "architecture": manifest.architecture,
        "granularity": manifest.granularity,
        "format": manifest.weight_format,
        "classes": manifest.classes,
        "layers": len(manifest.layers),
        "bytes": model.bytes,
        "parameters": sum(_parameters(layer) for layer in manifest.layers),
        "dtype": manifest.dtype,
        "source": manifest.source,
        **execution_facts(manifest.optimization),
        "preset": manifest.preset,
        "input": manifest.input.model_dump(mode="json") if manifest.input else None,
    }


def execution_facts(optimization: Optimization | None) -> dict[str, str]:
    """How the model is executed, how near that is to torchvision, and what it gained."""
    if optimization is None:
        return {"execution": "as torchvision's, bit for bit"}
    layout = optimization.memory_format.replace("_", " ")
    return {
        "execution": f"fused, weights {layout}: within 1e-4 of the largest logit",
        "gain": f"{optimization.optimized_ms:.1f} ms instead of {optimization.plain_ms:.1f}, "
        f"{optimization.threads} threads, where prepared",
    }


def layer_facts(model: PreparedModel) -> list[dict[str, Any]]:
    return [
        {
            "index": layer.index,
            "name": layer.name,
            "file": layer.file,
            "bytes": layer.bytes,
            "tensors": len(layer.parameters),
            "parameters": _parameters(layer),
            "sha256": layer.sha256,
        }
        for layer in model.manifest.layers
    ]


def _parameters(layer: LayerEntry) -> int:
    return sum(tensor.elements for tensor in layer.parameters if tensor.parameter)
