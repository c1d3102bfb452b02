"""What a file that holds no readable weights is instead, told from its content, in words for a person."""

import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import filetype

_RATHER: Final = "expected what torch.save(model.state_dict(), file) or safetensors writes"
_START_BYTES: Final = 4096
_JSON_BYTES: Final = 64 << 20
_SHOWN: Final = 3
_ZIP: Final = b"PK\x03\x04"
_TORCH_PICKLE: Final = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
"""How files of torch.save before torch 1.6 start: a pickled number."""
_STARTS: Final = (
    (b"version https://git-lfs", "a Git LFS pointer instead of the file it stands for: `git lfs pull` fetches that"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"GGUF", "a GGUF file"),
    (b"PK\x05\x06", "an empty zip archive"),
    (b"(dp", "a pickle that torch.save did not write"),
)  # fmt: skip
_LEAST_ONNX_VERSION: Final = 3
_AFTER_VERSION: Final = b"\x12\x1a\x22\x2a\x32\x3a\x42"
"""Tags of the fields of an ONNX ModelProto (onnx.proto) that may follow its first, `ir_version`."""


def start_of(path: Path) -> bytes:
    """Raises OSError."""
    with path.open("rb") as file:
        return file.read(_START_BYTES)


def is_zip(start: bytes) -> bool:
    return start.startswith(_ZIP)


def is_torch_pickle(start: bytes) -> bool:
    return start.startswith(_TORCH_PICKLE)


def is_safetensors(start: bytes) -> bool:
    """By its form: eight bytes of header length, then a JSON object."""
    return start[8:9] == b"{" and int.from_bytes(start[:8], "little") < 1 << 40


def safetensors_bytes(path: Path, start: bytes) -> int | None:
    """The size that the file's header says it has; None if the header itself cannot be read."""
    header_bytes = int.from_bytes(start[:8], "little")
    if header_bytes > path.stat().st_size - 8:
        return 8 + header_bytes
    if header_bytes > _JSON_BYTES:
        return None
    with path.open("rb") as file:
        file.seek(8)
        encoded = file.read(header_bytes)
    try:
        header = json.loads(encoded)
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        return 8 + header_bytes + max(ends, default=0)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def recognized(path: Path, start: bytes) -> str | None:
    """What the file is, if that is known and not a checkpoint: `is` goes before it in a sentence."""
    if not start:
        return "empty"
    if not any(start):
        return "not all there: it begins with zeros alone, as of a download that did not finish"
    for beginning, what in _STARTS:
        if start.startswith(beginning):
            return what
    if is_zip(start):
        return _zip_kind(path)
    if start.startswith(b"\x80") and not is_torch_pickle(start):
        return _pickle_kind(start)
    return _text_kind(path, start) or _protobuf_kind(start) or _other_kind(start)


def _zip_kind(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception:  # noqa: BLE001 - damaged bytes fail in zipfile wherever they lead it
        return "cut short or damaged: a zip archive without the directory at its end, as of half a download"
    inner = [name.partition("/")[2] for name in names]
    if "constants.pkl" in inner or any(name.startswith("code/") for name in inner):
        return f"TorchScript, code together with weights; {_RATHER}"
    if "archive_format" in inner or any(name.startswith("models/") for name in inner):
        return f"an exported program (torch.export), code together with weights; {_RATHER}"
    if "data.pkl" in inner or "data.pkl" in names:
        return None
    return _archive_kind(names)


def _archive_kind(names: Sequence[str]) -> str:
    if "model.weights.h5" in names:
        return "a Keras model"
    if any(name.endswith(".npy") for name in names):
        return "an archive of NumPy arrays"
    return f"a zip archive of {_listed(names)}; expected the checkpoint that may be in it"


def _pickle_kind(start: bytes) -> str:
    if b"torch._utils" in start or b"_rebuild_tensor" in start:
        return f"a pickle with tensors, but not one that torch.save wrote; {_RATHER}"
    return f"a pickle that torch.save did not write; {_RATHER}"


def _text_kind(path: Path, start: bytes) -> str | None:
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if re.match(rb"<!doctype html|<html|<head|<body", text) or (
        text.startswith((b"<!--", b"<?xml")) and b"<html" in text
    ):
        return "a web page, as of a download that needed another address or a login"
    if text.startswith(b"<?xml"):
        return "an XML document, as a storage service answers when it refuses a download"
    if text.startswith((b"{", b"[")):
        return _json_kind(path)
    if b"\0" not in start and _is_text(start):
        first = start.decode(errors="ignore").strip().partition("\n")[0][:60].strip()
        return f"text, which begins with {first!r}"
    return None


def _is_text(start: bytes) -> bool:
    try:
        text = start.decode()
    except UnicodeDecodeError as error:
        if error.start < len(start) - 4:  # else a character cut in two
            return False
        text = start[: error.start].decode()
    return all(character.isprintable() or character in "\r\n\t\f" for character in text)


def _json_kind(path: Path) -> str | None:
    if path.stat().st_size > _JSON_BYTES:
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return None
    if isinstance(content, dict) and "weight_map" in content:
        return "the index of a checkpoint in several files; expected one file with all weights"
    return "a JSON document"


def _protobuf_kind(start: bytes) -> str | None:
    if len(start) < 3 or start[0] != 0x08 or start[2] not in _AFTER_VERSION:
        return None
    if start[1] == 1:
        return "a TensorFlow SavedModel"
    return f"an ONNX model; {_RATHER}" if _LEAST_ONNX_VERSION <= start[1] < 64 else None


def _other_kind(start: bytes) -> str | None:
    if start[4:8] == b"TFL3":
        return "a TensorFlow Lite model"
    guessed = filetype.guess(start)
    return None if guessed is None else f"{guessed.mime}, going by its first bytes"


def _listed(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{len(names)} files ({', '.join(names[:_SHOWN])}{more})"
