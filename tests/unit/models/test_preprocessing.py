import math

import pytest

from models import preprocessing, pretrained
from models.preprocessing import Changes, PreprocessingError


def test_without_changes_it_is_torchvision_s_preset() -> None:
    found = preprocessing.chosen("resnet50", 224, fixed=False)
    assert found == pretrained.preset("resnet50", 224)
    assert found.name == "IMAGENET1K_V2"


def test_a_preset_by_name() -> None:
    found = preprocessing.chosen("resnet50", 224, "IMAGENET1K_V1", fixed=False)
    assert (found.name, found.input.resize) == ("IMAGENET1K_V1", 256)
    with pytest.raises(pretrained.PretrainedError, match="expected one of IMAGENET1K_V1"):
        preprocessing.chosen("resnet50", 224, "V1", fixed=False)


def test_changes_change_just_that() -> None:
    changes = Changes(resize=(300, 200), mean=(0.5, 0.5, 0.5), interpolation="lanczos")
    found = preprocessing.chosen("resnet18", 224, None, changes, fixed=False)
    usual = pretrained.preset("resnet18", 224)
    assert found.name == "IMAGENET1K_V1, but resize, mean, interpolation"
    assert found.input.model_dump() == usual.input.model_dump() | {
        "resize": (300, 200),
        "mean": (0.5, 0.5, 0.5),
        "interpolation": "lanczos",
    }


def test_a_crop_alone_scales_the_resizing_with_it() -> None:
    found = preprocessing.chosen("resnet18", 224, None, Changes(crop=448), fixed=False)
    assert (found.input.resize, found.input.crop) == (512, 448)


def test_all_of_one_s_own() -> None:
    changes = Changes(32, 32, (0.1, 0.2, 0.3), (1.0, 2.0, 3.0), "nearest")
    assert preprocessing.chosen("vgg11", 224, None, changes, fixed=False).name == "own"


def test_a_vit_takes_no_other_size_than_its_own() -> None:
    assert preprocessing.chosen("vit_b_16", 384, fixed=True).input.crop == 384
    with pytest.raises(
        PreprocessingError, match=r"takes images of 384 x 384 .* expected --crop 384"
    ):
        preprocessing.chosen("vit_b_16", 384, None, Changes(crop=224), fixed=True)
    with pytest.raises(PreprocessingError, match="but would get 224: expected --crop 384"):
        preprocessing.chosen("vit_b_16", 384, "IMAGENET1K_V1", fixed=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"resize": 0},
        {"resize": (0, 2)},
        {"resize": (2, 0)},
        {"crop": 0},
        {"mean": (0.0, math.nan, 0.0)},
        {"std": (1.0, 0.0, 1.0)},
        {"std": (1.0, -1.0, 1.0)},
        {"std": (1.0, math.inf, 1.0)},
    ],
)
def test_what_no_image_can_be_prepared_by(wrong: dict[str, object]) -> None:
    with pytest.raises(PreprocessingError, match=next(iter(wrong))):
        Changes(**wrong)  # type: ignore[arg-type]
