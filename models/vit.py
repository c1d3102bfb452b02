"""Vision Transformer as a chain of layers."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torchvision.models.vision_transformer import MLPBlock, VisionTransformer

from models.layers import Layer
from models.manifest import Granularity


def layers(model: VisionTransformer, granularity: Granularity) -> Iterator[Layer]:
    """The chain of a torchvision ViT.

    `conv_proj` includes the reshaping into a sequence, `heads` the choice of the class token. As blocks,
    the encoder is its position embedding, its blocks and its final normalization.
    """
    yield Layer(
        "conv_proj", model.conv_proj, "conv_proj.", run=_patches, initialize=_initialize_patches
    )
    yield Layer(
        "class_token", _bare("class_token", model), "", run=_prepend, initialize=_zero_class_token
    )
    if granularity == "stage":
        yield Layer("encoder", model.encoder, "encoder.", initialize=_initialize_encoder)
    else:
        yield Layer(
            "encoder.pos_embedding",
            _bare("pos_embedding", model.encoder),
            "encoder.",
            run=_add_positions,
            initialize=_initialize_encoder,
        )
        for name, block in model.encoder.layers.named_children():
            place = f"encoder.layers.{name}"
            yield Layer(place, block, f"{place}.", initialize=_initialize_encoder)
        yield Layer("encoder.ln", model.encoder.ln, "encoder.ln.", initialize=_initialize_encoder)
    yield Layer("heads", model.heads, "heads.", run=_classify, initialize=_initialize_heads)


def _bare(name: str, owner: nn.Module) -> nn.Module:
    """A tree of one parameter, which in torchvision's model lies directly on `owner`."""
    root = nn.Module()
    root.register_parameter(name, owner.get_parameter(name))
    return root.eval()


def _patches(conv_proj: nn.Module, image: Tensor) -> Tensor:
    projected: Tensor = conv_proj(image)
    return projected.reshape(projected.shape[0], projected.shape[1], -1).permute(0, 2, 1)


def _prepend(root: nn.Module, sequence: Tensor) -> Tensor:
    token: Tensor = root.class_token  # type: ignore[assignment]
    return torch.cat([token.expand(sequence.shape[0], -1, -1), sequence], dim=1)


def _add_positions(root: nn.Module, sequence: Tensor) -> Tensor:
    embedding: Tensor = root.pos_embedding  # type: ignore[assignment]
    return sequence + embedding


def _classify(heads: nn.Module, sequence: Tensor) -> Tensor:
    logits: Tensor = heads(sequence[:, 0])
    return logits


def _initialize_patches(conv_proj: nn.Module) -> None:
    for module in conv_proj.modules():
        if isinstance(module, nn.Conv2d):
            fan_in = module.in_channels * module.kernel_size[0] * module.kernel_size[1]
            nn.init.trunc_normal_(module.weight, std=math.sqrt(1 / fan_in))
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def _zero_class_token(root: nn.Module) -> None:
    nn.init.zeros_(root.get_parameter("class_token"))


def _initialize_encoder(root: nn.Module) -> None:
    for module in root.modules():
        embedding = module._parameters.get("pos_embedding")
        if embedding is not None:
            nn.init.normal_(embedding, std=0.02)
        if isinstance(module, MLPBlock):
            _initialize_mlp(module)


def _initialize_mlp(block: MLPBlock) -> None:
    for module in block.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.normal_(module.bias, std=1e-6)


def _initialize_heads(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if isinstance(module, nn.Linear):
            if name == "pre_logits":
                nn.init.trunc_normal_(module.weight, std=math.sqrt(1 / module.in_features))
            else:
                nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
