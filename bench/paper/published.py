"""What the paper states, to stand beside what was measured. Parts of one: 0.6159 is 61.59 %.

"Cicada: A Pipeline-Efficient Approach to Serverless Inference with Decoupled Management", sections II and V.
"""

from typing import Final

STRATEGIES: Final = ("traditional", "pisel", "preload", "mini", "cicada")
"""In the order of the paper's figures, with traditional loading before them."""
TIMELINE_MODELS: Final = ("resnet152", "vgg19", "vit_l_16")
FAMILIES: Final = ("resnet", "vgg", "vit")


def family(model: str) -> str:
    """`vit_b_16` -> `vit`."""
    return next(name for name in FAMILIES if model.startswith(name))


LATENCY_REDUCTION: Final = {"preload": 0.0615, "mini": 0.5341, "cicada": 0.6159}
"""Mean over the ten models, against pisel."""
OTHER_LATENCY_REDUCTIONS: Final = {
    "the paper's second version": 0.3479,
    "its authors' data": 0.4577,
}
"""Of cicada against pisel. In the authors' data PISeL is slower than plain loading."""
CICADA_AGAINST: Final = {"mini": 0.1621, "preload": 0.5857}
CICADA_AGAINST_PRELOAD: Final = {
    "vgg19": 0.7371,
    "vgg11": 0.7469,
    "resnet152": 0.6682,
    "resnet50": 0.6978,
}
CICADA_AGAINST_MINI: Final = {"vit_b_16": 0.1511, "vit_l_16": 0.2617}
RESIDENT_MB: Final = {"resnet50": 97.49, "vit_l_16": 1162.0}
"""The paper's megabytes are 2^20 bytes: ResNet-50's 25,557,032 parameters of 4 bytes are 97.49 of them."""
FILE_PROCESSING_SHARE: Final = 0.793
"""Of weight loading, on average; the rest is application."""
INITIALIZATION_SHARE_AT_LEAST: Final = 0.5
"""Of layer construction."""
PLACEHOLDER_RATIO: Final = 1 / 32
USAGE_TIME_CHANGE: Final = 0.2722
"""mini against pisel, mean; at most 0.8093, of resnet152."""
WORK_CHANGE: Final = {("mini", "layer"): -0.6312, ("preload", "weight"): -0.7844}
WAIT_CHANGE: Final = {
    ("mini", "weight"): 0.2722,
    ("mini", "compute"): 0.2996,
    ("preload", "compute"): 0.1563,
}
UTILIZATION: Final = {
    "with MiniLoader": {"resnet": 0.9984, "vgg": 0.9961, "vit": 0.9995},
    "without": {"resnet": 0.3627, "vgg": 0.2829, "vit": 0.7034},
}


MACHINE: Final = "2 Intel Xeon Gold 6248R (96 cores in all), 128 GB, Ubuntu 22.04"
