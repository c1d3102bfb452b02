"""A file of class names as people have them -> the names in the order of the classes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from models.errors import ModelError

_SHOWN: Final = 5
_LONGEST_TEXT: Final = 64 << 20
_NESTED: Final = ("id2label", "label2id", "labels", "classes", "class_to_idx", "idx_to_class")
"""Under which configurations of other libraries keep their classes."""


class LabelsError(ModelError):
    """A file of labels that cannot be used; the message names file, found and expected."""


def read(path: Path, classes: int) -> list[str]:
    """The labels of the file, one for each class.

    Text, a label a line; or JSON: a list of labels, or an index map, from index to label, from index to
    [id, label] (imagenet_class_index.json) or from label to index (class_to_idx). Raises LabelsError, and
    OSError if the file cannot be read.
    """
    text = _text(path)
    content = _json(path, text)
    labels = _lines(path, text) if content is None else _from_json(path, content)
    if len(labels) != classes:
        raise LabelsError(
            f"{path} has {len(labels)} labels, expected {classes}: one for each class of the model"
        )
    return labels


def _text(path: Path) -> str:
    if path.stat().st_size > _LONGEST_TEXT:
        raise LabelsError(f"{path} is no file of labels: it has {path.stat().st_size} bytes")
    encoded = path.read_bytes()
    encoding = "utf-16" if encoded[:2] in {b"\xff\xfe", b"\xfe\xff"} else "utf-8-sig"
    try:
        text = encoded.decode(encoding)
    except UnicodeDecodeError as error:
        raise LabelsError(f"{path} is not UTF-8: byte {error.start} cannot be read") from error
    if "\0" in text:
        raise LabelsError(f"{path} is not text: it has a zero character")
    return text


def _json(path: Path, text: str) -> object:
    """What the text is as JSON, if it is a list or an object; None for lines of text."""
    if not text.lstrip().startswith(("[", "{")):
        if path.suffix.lower() == ".json":
            raise LabelsError(f"{path} is not a JSON list or object")
        return None
    try:
        content: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        if path.suffix.lower() == ".json":
            raise LabelsError(f"{path} is not JSON: {error}") from error
        return None
    return content


def _lines(path: Path, text: str) -> list[str]:
    """Only line feeds end a line: other separators of Unicode may be part of a label."""
    lines = text.replace("\r\n", "\n").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise LabelsError(f"{path}: line {number} is empty, expected a label a line")
    return [line.strip() for line in lines]


def _from_json(path: Path, content: object) -> list[str]:
    if isinstance(content, list):
        return [_label(path, place, label) for place, label in enumerate(content)]
    if isinstance(content, Mapping):
        nested = [key for key in _NESTED if isinstance(content.get(key), list | dict)]
        if nested:
            return _from_json(path, content[nested[0]])
        return _from_map(path, content)
    raise LabelsError(f"{path} has {type(content).__name__}, expected a list or an index map")


def _from_map(path: Path, content: Mapping[str, object]) -> list[str]:
    if content and all(type(value) is int for value in content.values()):
        pairs = [(value, key) for key, value in content.items()]
    else:
        pairs = [(_index(path, key), _label(path, key, value)) for key, value in content.items()]
    labels = dict(pairs)
    if sorted(labels) != list(range(len(pairs))):  # type: ignore[type-var]
        absent = [index for index in range(len(pairs)) if index not in labels]
        raise LabelsError(
            f"{path} has {len(pairs)} labels, but none for the classes {_listed(absent)}: "
            f"expected each index from 0 to {len(pairs) - 1} once"
        )
    return [_label(path, index, labels[index]) for index in range(len(pairs))]


def _index(path: Path, key: str) -> int:
    if not (key.isascii() and key.isdecimal()):
        raise LabelsError(f"{path} has the key {key!r}, expected an index, or an index as value")
    return int(key)


def _label(path: Path, place: object, value: object) -> str:
    if isinstance(value, list) and len(value) == 2:  # an id that ImageNet has for it, and the label
        value = value[1]
    if not isinstance(value, str) or not value.strip():
        raise LabelsError(f"{path} has {value!r} for class {place}, expected a label")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise LabelsError(f"{path}: the label {value!r} is not valid Unicode") from error
    return value.strip()


def _listed(indices: Sequence[int]) -> str:
    more = ", ..." if len(indices) > _SHOWN else ""
    return ", ".join(str(index) for index in indices[:_SHOWN]) + more
