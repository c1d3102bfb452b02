import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from models.manifest import InputSpec, LayerEntry, Manifest, TensorEntry
from models.store import (
    CorruptModel,
    PreparedModel,
    Store,
    StoreError,
    UnknownModel,
    Writer,
    _read_cached,
)

INPUT = InputSpec(
    resize=256, crop=224, mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2), interpolation="bilinear"
)


def write_version(
    writer: Writer, content: bytes, labels: tuple[str, ...] | None = None
) -> Manifest:
    """A model of two layers, one with a file of these bytes."""
    (writer.path / "000-fc.safetensors").write_bytes(content)
    weights = TensorEntry(name="fc.weight", dtype="U8", shape=(1,), offset=0, parameter=True)
    layers = (
        LayerEntry(
            index=0,
            name="fc",
            file="000-fc.safetensors",
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            parameters=(weights,),
        ),
        LayerEntry(index=1, name="relu", file=None, bytes=0, sha256=None, parameters=()),
    )
    return Manifest(
        format_version=1,
        architecture="resnet18",
        image_size=224,
        granularity="block",
        weight_format="safetensors",
        classes=len(labels or "x"),
        input=INPUT,
        labels="labels.json" if labels else None,
        labels_sha256=writer.write_labels(labels) if labels else None,
        source="random:0",
        layers=layers,
    )


def add(
    store: Store, name: str, content: bytes, labels: tuple[str, ...] | None = None
) -> PreparedModel:
    with store.writer(name) as writer:
        return writer.publish(write_version(writer, content, labels))


def everything(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "weights")


def test_importing_the_store_does_not_load_torch() -> None:
    script = "import sys, models.store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_store_that_does_not_exist_has_no_models(store: Store) -> None:
    assert store.names() == []
    with pytest.raises(UnknownModel, match="there is no model 'a'"):
        store.open("a")


def test_what_was_published_is_opened(store: Store) -> None:
    published = add(store, "small", b"abc", labels=("Katze", "犬", 'quo"te\n'))
    opened = store.open("small")
    assert opened == published
    assert opened.labels == ("Katze", "犬", 'quo"te\n')
    assert opened.path == store.root / ".versions" / "small" / opened.version
    assert (opened.path / "000-fc.safetensors").read_bytes() == b"abc"
    assert (store.root / "small").readlink() == Path(f".versions/small/{opened.version}")
    assert store.names() == ["small"]


def test_the_version_is_the_digest_of_the_manifest_file(store: Store) -> None:
    model = add(store, "small", b"abc")
    encoded = (model.path / "manifest.json").read_bytes()
    assert model.version == hashlib.sha256(encoded).hexdigest()[:12]
    assert json.loads(encoded)["layers"][0]["sha256"] == hashlib.sha256(b"abc").hexdigest()


def test_names_are_sorted(store: Store) -> None:
    for name in ("b", "a-1", "c"):
        add(store, name, b"x")
    assert store.names() == ["a-1", "b", "c"]


def test_the_same_content_is_the_same_version_and_leaves_nothing_more(store: Store) -> None:
    first = add(store, "small", b"abc", labels=("a", "b"))
    before = everything(store.root)
    inode = (first.path / "000-fc.safetensors").stat().st_ino
    assert add(store, "small", b"abc", labels=("a", "b")) == first
    assert everything(store.root) == before
    assert (first.path / "000-fc.safetensors").stat().st_ino == inode


def test_labels_take_part_in_the_version(store: Store) -> None:
    first = add(store, "small", b"abc", labels=("a", "b"))
    assert add(store, "small", b"abc", labels=("a", "c")).version != first.version


def test_the_current_and_the_previous_version_are_kept(store: Store) -> None:
    a, b, c = (add(store, "small", content).version for content in (b"a", b"b", b"c"))
    assert store.versions("small") == [c, b]
    assert store.open("small").version == c
    assert store.open("small", b).version == b
    with pytest.raises(UnknownModel, match=f"no version '{a}'"):
        store.open("small", a)


def test_returning_to_the_previous_content_keeps_both(store: Store) -> None:
    a = add(store, "small", b"a").version
    b = add(store, "small", b"b").version
    assert add(store, "small", b"a").version == a
    assert store.versions("small") == [a, b]
    assert add(store, "small", b"a").version == a
    assert store.versions("small") == [a, b]


def test_an_opened_version_stays_whole_while_a_new_one_comes(store: Store) -> None:
    opened = add(store, "small", b"old")
    add(store, "small", b"new")
    assert (opened.path / "000-fc.safetensors").read_bytes() == b"old"


def test_a_failed_preparation_leaves_nothing(store: Store) -> None:
    with pytest.raises(ZeroDivisionError), store.writer("small") as writer:
        write_version(writer, b"abc", labels=("a",))
        _ = 1 / 0
    assert everything(store.root) == []
    add(store, "small", b"abc")
    before = everything(store.root)
    with pytest.raises(KeyboardInterrupt), store.writer("small") as writer:
        write_version(writer, b"def")
        raise KeyboardInterrupt
    assert everything(store.root) == before


def test_a_preparation_that_is_not_published_leaves_nothing(store: Store) -> None:
    with store.writer("small") as writer:
        write_version(writer, b"abc")
    assert everything(store.root) == []


@pytest.mark.parametrize("failing", ["rename", "symlink_to", "replace"])
def test_a_failure_while_publishing_leaves_the_old_version(
    store: Store, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    old = add(store, "small", b"old")
    before = everything(store.root)

    def fail(*_arguments: object, **_options: object) -> None:
        monkeypatch.undo()
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), store.writer("small") as writer:
        manifest = write_version(writer, b"new")
        monkeypatch.setattr(Path, failing, fail)
        writer.publish(manifest)
    assert everything(store.root) == before
    assert store.open("small") == old
    assert store.verify("small") == []


KILLED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_store
from models.store import Store
store = Store(Path({root!r}))
print("started", flush=True)
for number in range(1_000_000):
    test_store.add(store, "small", bytes([number % 251]) * 4096, labels=("a", "b"))
"""


def test_a_killed_preparation_never_harms_and_is_cleaned_up_by_the_next(store: Store) -> None:
    add(store, "small", b"first")
    script = KILLED.format(tests=str(Path(__file__).parent), root=str(store.root))
    chance = random.Random(0)
    for _ in range(8):
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"started\n"
            deadline = time.monotonic() + chance.uniform(0.0, 0.2)
            while time.monotonic() < deadline:
                assert store.open("small").manifest.architecture == "resnet18"
            process.send_signal(signal.SIGKILL)
        assert store.names() == ["small"]
        assert store.verify("small") == []
    model = add(store, "small", b"last")
    assert store.open("small") == model
    left = everything(store.root)
    assert not [path for path in left if ".new-" in path or ".old-" in path]
    assert len(store.versions("small")) <= 2


def test_leftovers_of_a_dead_process_go_and_those_of_a_living_one_stay(store: Store) -> None:
    add(store, "small", b"abc")
    versions = store.root / ".versions"
    (versions / ".new-dead").mkdir()
    (versions / ".new-dead" / ".lock").touch()
    (versions / ".old-dead").mkdir()
    (versions / ".new-link").symlink_to(".versions/small/0123456789ab")
    with store.writer("other") as living:
        manifest = write_version(living, b"other")
        add(store, "small", b"def")
        assert living.path.exists()
        living.publish(manifest)
    assert store.names() == ["other", "small"]
    assert sorted(path.name for path in versions.iterdir()) == [".lock", "other", "small"]


def test_many_preparations_of_one_model_at_once(store: Store) -> None:
    count = 12
    barrier = threading.Barrier(count)

    def prepare(number: int) -> None:
        barrier.wait(30)
        for turn in range(5):
            add(store, "small", f"{number % 4}-{turn}".encode())

    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(prepare, range(count))) == [None] * count
    assert store.verify("small") == []
    assert len(store.versions("small")) == 2
    assert not [path for path in everything(store.root) if ".new-" in path or ".old-" in path]


@pytest.mark.parametrize(
    "name", ["", "A", "../x", "a/b", ".versions", ".new-1", "a" * 65, "-a", "a\n", "ä", "a\0"]
)
def test_what_is_no_model_name_is_refused(store: Store, name: str) -> None:
    add(store, "small", b"abc")
    with pytest.raises(StoreError, match="is no model name"), store.writer(name):
        pytest.fail("the writer was given")
    for refused in (store.open, store.versions, store.remove):
        with pytest.raises(UnknownModel):
            refused(name)


@pytest.mark.parametrize("version", ["", "..", "../../..", "0" * 12, "A" * 12, "0123456789ab\n"])
def test_what_is_no_version_is_unknown(store: Store, version: str) -> None:
    add(store, "small", b"abc")
    if version == "":
        assert store.open("small", version or None)
        return
    with pytest.raises(UnknownModel, match="has no version"):
        store.open("small", version)


def test_what_does_not_belong_is_neither_followed_nor_touched(store: Store, tmp_path: Path) -> None:
    model = add(store, "small", b"abc")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "manifest.json").write_bytes((model.path / "manifest.json").read_bytes())
    (store.root / "folder").mkdir()
    (store.root / "file").write_text("x")
    (store.root / "elsewhere").symlink_to(outside)
    (store.root / "absolute").symlink_to(model.path)
    (store.root / "other").symlink_to(f".versions/small/{model.version}")
    (store.root / "dangling").symlink_to(".versions/dangling/0123456789ab")
    (store.root / ".versions" / "linked").symlink_to(outside)
    (store.root / "linked").symlink_to(".versions/linked/0123456789ab")
    assert store.names() == ["small"]
    for name in ("folder", "file", "elsewhere", "absolute", "other", "dangling", "linked"):
        with pytest.raises(UnknownModel):
            store.open(name)
    for name in ("folder", "file", "elsewhere", "absolute", "other", "linked"):
        with pytest.raises(StoreError, match="in the way"), store.writer(name):
            pytest.fail("the writer was given")
    assert everything(outside) == ["manifest.json"]
    assert (store.root / "file").read_text() == "x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "changed since"),
        (b"{", "changed since"),
        (b"\xff\xfe", "changed since"),
        (b'{"format_version": 2}', "changed since"),
    ],
)
def test_a_changed_manifest_is_reported_with_model_and_file(
    store: Store, content: bytes, message: str
) -> None:
    model = add(store, "small", b"abc")
    (model.path / "manifest.json").write_bytes(content)
    with pytest.raises(CorruptModel, match=message) as caught:
        store.open("small")
    assert "'small'" in str(caught.value)
    assert ": manifest.json: " in str(caught.value)
    assert store.names() == []
    assert store.damaged() == ["small"]
    assert store.verify("small") == [str(caught.value)]


def plant(store: Store, manifest: dict[str, object]) -> None:
    """A version whose digest is right and whose manifest says what it likes."""
    encoded = json.dumps(manifest).encode()
    version = hashlib.sha256(encoded).hexdigest()[:12]
    folder = store.root / ".versions" / "small" / version
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(encoded)
    link = store.root / "small"
    link.unlink(missing_ok=True)
    link.symlink_to(f".versions/small/{version}")


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("file",), "../../../etc/passwd"),
        (("file",), "/etc/passwd"),
        (("file",), "000-other.safetensors"),
        (("file",), "000-fc.pth"),
        (("file",), None),
        (("sha256",), None),
        (("index",), 7),
        (("bytes",), -1),
        (("bytes",), 0),
        (("parameters",), []),
        (("parameters", 0, "offset"), 3),
        (("parameters", 0, "offset"), 64),
        (("parameters", 0, "shape"), [4]),
        (("parameters", 0, "shape"), [-1]),
        (("parameters", 0, "dtype"), "C64"),
    ],
)
def test_a_manifest_that_contradicts_itself_or_leads_outside_is_corrupt(
    store: Store, place: tuple[str | int, ...], value: object
) -> None:
    model = add(store, "small", b"abc")
    manifest = json.loads((model.path / "manifest.json").read_bytes())
    plant(store, manifest | {"source": "planted"})
    assert store.open("small").manifest.source == "planted"
    inner = manifest["layers"][0]
    for step in place[:-1]:
        inner = inner[step]
    inner[place[-1]] = value
    plant(store, manifest)
    with pytest.raises(CorruptModel, match="'small'"):
        store.open("small")


def test_changed_labels_are_found(store: Store) -> None:
    model = add(store, "small", b"abc", labels=("a", "b"))
    (model.path / "labels.json").write_text('["a", "x"]')
    assert store.verify("small") == ["labels.json: was changed since it was prepared"]
    (model.path / "labels.json").unlink()
    assert "labels.json" in store.verify("small")[0]


def test_verify_finds_a_missing_a_longer_and_a_changed_file(store: Store, tmp_path: Path) -> None:
    model = add(store, "small", b"abc")
    assert store.verify("small") == []
    path = model.path / "000-fc.safetensors"
    path.write_bytes(b"abd")
    assert "has sha256" in store.verify("small")[0]
    path.write_bytes(b"abcd")
    assert store.verify("small") == ["000-fc.safetensors: has 4 bytes, expected 3"]
    path.unlink()
    assert store.verify("small") == ["000-fc.safetensors: No such file or directory"]
    (tmp_path / "copy").write_bytes(b"abc")
    path.symlink_to(tmp_path / "copy")
    assert store.verify("small") == ["000-fc.safetensors: is not a regular file"]


def _unreadable(*_: object) -> bytes:
    """As of a bad disk: an error of reading, unlike one of opening, names no file."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_a_weight_file_that_cannot_be_read_is_a_finding(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, "small", b"abc")
    monkeypatch.setattr("models.store._file_sha256", _unreadable)
    assert store.verify("small") == ["000-fc.safetensors: Input/output error"]


def test_a_manifest_that_cannot_be_read_is_corrupt(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(store, "small", b"abc")
    _read_cached.cache_clear()  # publishing has read it
    monkeypatch.setattr(Path, "read_bytes", _unreadable)
    with pytest.raises(CorruptModel, match=r"'small': manifest\.json: Input/output error"):
        store.open("small")


def test_versions_that_go_while_they_are_listed_are_no_error(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = add(store, "small", b"abc")
    shutil.rmtree(model.path)
    with monkeypatch.context() as patch:
        patch.setattr(Store, "_version_folders", lambda *_: [model.version])
        assert store.versions("small") == [model.version]
    shutil.rmtree(model.path.parent)
    monkeypatch.setattr(Store, "_has_versions", lambda *_: True)
    assert store.versions("small") == []


@pytest.mark.parametrize("damaged", ["000-fc.safetensors", "manifest.json", "labels.json"])
def test_preparing_again_repairs_a_damaged_version(store: Store, damaged: str) -> None:
    model = add(store, "small", b"abc", labels=("a",))
    (model.path / damaged).write_bytes(b"xyz")
    assert store.verify("small") != []
    assert add(store, "small", b"abc", labels=("a",)).version == model.version
    assert store.verify("small") == []
    assert store.names() == ["small"]


def test_a_new_manifest_is_seen_though_the_old_one_was_read(store: Store) -> None:
    for number in range(100):
        model = add(store, "small", str(number).encode())
        assert store.open("small") == model
        assert store.open("small") is store.open("small")


def test_removal_leaves_the_other_models(store: Store) -> None:
    add(store, "small", b"abc")
    add(store, "small", b"def")
    other = add(store, "other", b"abc")
    store.remove("small")
    assert store.names() == ["other"]
    assert sorted(path.name for path in (store.root / ".versions").iterdir()) == [".lock", "other"]
    assert store.open("other") == other
    with pytest.raises(UnknownModel):
        store.remove("small")
    store.remove("other")
    assert everything(store.root) == []


def test_a_model_without_its_link_is_unknown_and_can_be_removed(store: Store) -> None:
    model = add(store, "small", b"abc")
    (store.root / "small").unlink()
    with pytest.raises(UnknownModel):
        store.open("small", model.version)
    store.remove("small")
    assert everything(store.root) == []


def test_versions_are_readable_by_others(store: Store) -> None:
    before = os.umask(0o022)
    try:
        model = add(store, "small", b"abc")
    finally:
        os.umask(before)
    assert model.path.stat().st_mode & 0o777 == 0o755
    assert (model.path / "manifest.json").stat().st_mode & 0o777 == 0o644


def test_a_store_that_cannot_be_written_says_so(store: Store, tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file")
    with pytest.raises(OSError, match=r"File exists|Not a directory"), store.writer("small"):
        pytest.fail("the writer was given")
