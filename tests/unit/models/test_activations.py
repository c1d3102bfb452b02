import pytest

from models import activations, catalog

IMAGE = 3 * 224 * 224 * 4
"""Bytes."""
LARGE_MAP = 64 * 112 * 112 * 4
"""What conv1 of a ResNet gives."""
LARGEST_MAP = 64 * 224 * 224 * 4
"""What the first convolutions of a VGG give."""


def test_a_resnet_peaks_in_its_first_normalization() -> None:
    """Its input and output are there, and the means and deviations that the operator returns, 2 x 64 x 4."""
    for name in ("resnet18", "resnet34"):
        assert activations.peak_bytes(catalog.architecture(name)) == 2 * LARGE_MAP + 512


def test_a_vgg_as_stages_peaks_in_its_second_convolution() -> None:
    """The image is the stage's input, so it is there until the stage's end."""
    chain = catalog.architecture("vgg11", granularity="stage")
    pooled = LARGEST_MAP // 4
    assert activations.peak_bytes(chain) == IMAGE + LARGEST_MAP + pooled + 2 * pooled
    chain = catalog.architecture("vgg16", granularity="stage")
    assert activations.peak_bytes(chain) == IMAGE + 2 * LARGEST_MAP


@pytest.mark.parametrize("name", ["resnet50", "vit_b_32"])
def test_it_depends_on_nothing_but_the_architecture(name: str) -> None:
    few = activations.peak_bytes(catalog.architecture(name, classes=3))
    assert few == activations.peak_bytes(catalog.architecture(name, classes=3))
    assert few == pytest.approx(activations.peak_bytes(catalog.architecture(name)), rel=0.01)


def test_a_vit_peaks_higher_with_larger_images() -> None:
    small, large = (
        activations.peak_bytes(catalog.architecture("vit_b_32", image_size=size))
        for size in (224, 448)
    )
    assert large > 3 * small
