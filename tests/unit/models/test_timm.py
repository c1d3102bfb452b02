"""A handful of timm's models, which know nothing of ours, made by timm's own factory."""

import pytest
import timm
import torch
from pydantic import JsonValue

from models import examples, general, own
from models.manifest import UserCode
from models.random_weights import RandomWeights

MODELS = (
    "resnet26d",
    "mobilenetv4_conv_small",
    "tf_efficientnetv2_b0",
    "vit_tiny_patch16_224",
    "mixer_s32_224",
    "convnextv2_atto",
    "levit_128s",
    "edgenext_xx_small",
)


@pytest.mark.parametrize("name", MODELS)
def test_the_output_is_the_plain_models_bit_for_bit(name: str) -> None:
    factory = UserCode(target="timm:create_model")
    options: dict[str, JsonValue] = {"model_name": name, "num_classes": 7}
    specs = examples.parse("1x3x224x224")
    made = own.module(factory, options)
    chain = own.architecture(made, factory, options, specs, "block")
    weights = RandomWeights(chain, 4)

    plain = timm.create_model(name, num_classes=7).eval()
    state = plain.state_dict()
    state.update({key: weights[chain.aliases.get(key, key)] for key in state})
    plain.load_state_dict(state)
    image = examples.tensors(specs, seed=9)
    layers = [layer.build() for layer in chain.layers]
    for built in layers:
        built.bind(weights)
    with torch.inference_mode():
        expected = plain(image)
        assert torch.equal(chain.forward(layers, image), expected)
    assert expected.shape == (1, 7)
    assert expected.isfinite().all()
    assert len(chain.layers) > 2
    assert general.cuts(made, "block", image) == chain.cuts
