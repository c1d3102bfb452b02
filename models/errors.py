"""The base of every error that `models` and `bench` raise on purpose: its message is one sentence for a person.

ModelError
    StoreError              models/store.py
        UnknownModel            no such model, or no such version of it
        CorruptModel            a manifest that cannot be used
    CheckpointError         models/checkpoint.py: a weights file that cannot be used
    LabelsError             models/labels.py: a file of class names that cannot be used
    PreprocessingError      models/preprocessing.py: what the model's images cannot be prepared by
    PretrainedError         models/pretrained.py: weights that are not published
        DownloadError           models/download.py: what cannot be had from its host
    UnknownArchitecture     models/catalog.py
    Unsuitable              models/general.py: a module that cannot be served as layers
    UserCodeError           models/factories.py: the user's code, which cannot be had
    ExampleError            models/examples.py: an example of inputs that cannot be read
    OptionsError            models/own.py: keyword arguments that cannot be read
"""

import errno


class ModelError(Exception):
    """What was wrong, what was found and what was expected, in one sentence."""


def is_of_memory(error: BaseException) -> bool:
    """Whether Python, torch or the kernel found no memory, or no addresses for it: no one's fault."""
    return (
        isinstance(error, MemoryError)
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or "can't allocate memory" in str(error)
    )
