import json
from pathlib import Path

import pytest

from models import labels
from models.labels import LabelsError

WORDS = ["Łódź", "猫", "👩‍👩‍👧 family", "with, comma", "naïve\u2028line", "crane", "crane"]


def written(folder: Path, content: str | bytes, name: str = "labels.txt") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize(
    "content",
    [
        "\n".join(WORDS),
        "\n".join(WORDS) + "\n",
        "\r\n".join(WORDS) + "\r\n\r\n",
        ("\ufeff" + "\n".join(WORDS)).encode(),
        "\n".join(WORDS).encode("utf-16"),
        json.dumps(WORDS),
        json.dumps(WORDS, ensure_ascii=False),
        json.dumps(dict(enumerate(WORDS))),
        json.dumps(dict(reversed(list(enumerate(WORDS))))),
        json.dumps({index: [f"n{index:08}", word] for index, word in enumerate(WORDS)}),
        json.dumps({"model_type": "vit", "id2label": dict(enumerate(WORDS))}),
    ],
)
@pytest.mark.parametrize("name", ["labels.txt", "labels"])
def test_each_form_of_any_unicode(tmp_path: Path, content: str | bytes, name: str) -> None:
    assert labels.read(written(tmp_path, content, name), len(WORDS)) == WORDS


def test_a_map_from_label_to_index(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps({"dog": 1, "cat": 0, "owl": 2}), "class_to_idx.json")
    assert labels.read(path, 3) == ["cat", "dog", "owl"]


def test_text_that_only_begins_like_json(tmp_path: Path) -> None:
    assert labels.read(written(tmp_path, "[none]\ncat\n"), 2) == ["[none]", "cat"]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("cat\ndog\n", "l.txt", "has 2 labels, expected 3: one for each class"),
        ("", "l.txt", "has 0 labels, expected 3"),
        ("cat\n\ndog", "l.txt", "line 2 is empty"),
        (b"cat\nd\xf6g\nowl", "l.txt", "is not UTF-8: byte 5"),
        (b"PK\x03\x04\0\0", "l.txt", "zero character"),
        ('["cat", "dog"', "l.json", "is not JSON"),
        ("cat\ndog\nowl", "l.json", "is not a JSON list or object"),
        ('["cat", 3, "dog"]', "l.json", "has 3 for class 1, expected a label"),
        ('["cat", "", "dog"]', "l.json", "has '' for class 1"),
        ('["cat", "\\ud800", "dog"]', "l.json", "not valid Unicode"),
        ('{"0": "cat", "2": "dog", "3": "owl"}', "l.json", "none for the classes 1"),
        ('{"1": "cat", "2": "dog", "3": "owl"}', "l.json", "none for the classes 0"),
        ('{"0": "a", "00": "b", "1": "c"}', "l.json", "each index from 0 to 2 once"),
        ('{"cat": 0, "dog": 0, "owl": 1}', "l.json", "none for the classes 2"),
        ('{"zero": "cat"}', "l.json", "has the key 'zero', expected an index"),
        ('{"-1": "cat"}', "l.json", "has the key '-1', expected an index"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, content: str | bytes, name: str, message: str
) -> None:
    with pytest.raises(LabelsError, match=message) as caught:
        labels.read(written(tmp_path, content, name), 3)
    assert str(tmp_path / name) in str(caught.value)
    assert "\n" not in str(caught.value)
