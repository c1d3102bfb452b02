"""Control groups with a limit: real ones where they may be made, and their making in a tree that stands in for them."""

import subprocess
import sys
from pathlib import Path

import pytest

from bench import control_groups
from bench.control_groups import NotAllowed
from runtime import limits

MIB = 1 << 20
TAKING = """
import sys
from pathlib import Path
from bench.control_groups import Group
Group(Path(sys.argv[1]), "").join()
taken = bytearray(int(sys.argv[2]) << 20)
for page in range(0, len(taken), 4096):
    taken[page] = 1
print("taken")
"""


def taking(folder: Path, mebibytes: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", TAKING, str(folder), str(mebibytes)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_process_may_hold_so_much_and_no_more() -> None:
    try:
        with control_groups.memory_limited(96 * MIB) as group:
            assert taking(group.folder, 32).stdout == "taken\n"
            killed = taking(group.folder, 200)
            assert killed.stdout == ""
            assert killed.returncode == -9
    except NotAllowed as error:
        pytest.skip(str(error))
    assert not group.folder.exists()


def stand_in(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> None:
    monkeypatch.setattr(limits, "control_groups", lambda _root, _controller: iter(folders))


def test_where_no_group_may_be_made_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, tmp_path)
    with (
        pytest.raises(NotAllowed, match=r"has none of memory\.max, memory\.limit_in_bytes"),
        control_groups.memory_limited(MIB),
    ):
        pass
    assert list(tmp_path.iterdir()) == [], "what was made is removed"
    stand_in(monkeypatch)
    with (
        pytest.raises(NotAllowed, match="no such control group hierarchy"),
        control_groups.memory_limited(MIB),
    ):
        pass


@pytest.mark.parametrize(
    ("file", "value"),
    [("io.max", "254:0 rbps=1000"), ("blkio.throttle.read_bps_device", "254:0 1000")],
)
def test_reading_is_limited_in_either_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, value: str
) -> None:
    """The kernel puts its files into a new group; a folder that stands in for one has them from `mkdir` on."""
    made = Path.mkdir

    def with_files(folder: Path) -> None:
        made(folder)
        (folder / file).touch()

    monkeypatch.setattr(Path, "mkdir", with_files)
    monkeypatch.setattr(control_groups, "disk", lambda _: "254:0")
    monkeypatch.setattr(control_groups, "_remove", lambda _: None)
    stand_in(monkeypatch, tmp_path)
    with control_groups.read_limited(tmp_path, 1000) as group:
        assert (group.folder / file).read_text() == value
        assert group.setting == f"{file} = {value}"


def test_files_on_no_disk_have_none() -> None:
    with pytest.raises(NotAllowed, match="lies on no disk of its own"):
        control_groups.disk(Path("/proc"))
