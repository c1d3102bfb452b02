"""The user's code: found in a file or a package, and told apart from ours."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import models
from models import factories
from models.factories import UserCodeError
from models.manifest import UserCode

pytestmark = pytest.mark.usefixtures("imports_are_undone")

WHAT = "the factory"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_files_function_is_recorded_by_its_absolute_path_and_content(folder: Path) -> None:
    (folder / "mine.py").write_text("def make(): return 7\n")
    code = factories.function_code("mine.py:make", WHAT)
    assert code.target == f"{folder}/mine.py:make"
    assert code.sha256 is not None
    assert factories.with_distribution(code) == code
    assert factories.load_function(code, WHAT)() == 7


def test_a_package_is_recorded_by_its_name() -> None:
    code = factories.function_code("torch.nn:Linear", WHAT)
    assert code == UserCode(target="torch.nn:Linear")
    assert factories.load_function(code, WHAT)(2, 3).out_features == 3
    assert factories.with_distribution(code).distribution == f"torch {version('torch')}"


def test_a_file_named_as_a_package_of_ours_does_not_meet_it(folder: Path) -> None:
    (folder / "beside.py").write_text("VALUE = 5\n")
    (folder / "models.py").write_text("from beside import VALUE\ndef make(): return VALUE\n")
    assert factories.load_function(factories.function_code("models.py:make", WHAT), WHAT)() == 5
    assert sys.modules["models"] is models
    assert Path(str(models.__file__)).parent != folder


def test_a_file_is_run_once(folder: Path) -> None:
    (folder / "counting.py").write_text(
        "import sys\nsys.counted = getattr(sys, 'counted', 0) + 1\n"
    )
    code = factories.module_code("counting.py", WHAT)
    assert factories.load_module(code, WHAT) is factories.load_module(code, WHAT)
    assert sys.__dict__.pop("counted") == 1


@pytest.mark.parametrize("name", factories.OURS)
def test_a_package_that_bears_one_of_our_names_is_refused_with_that_reason(name: str) -> None:
    for target in (f"{name}:make", f"{name}.net:make"):
        with pytest.raises(UserCodeError, match=f"{name} is the name of a package of Cicada's own"):
            factories.function_code(target, WHAT)
    with pytest.raises(UserCodeError, match="Cicada's own"):
        factories.module_code(name, "the processing")


@pytest.mark.parametrize("line", ["from models.net import make", "from models import make"])
def test_a_file_that_imports_its_own_package_of_such_a_name_is_told_that_reason(
    folder: Path, line: str
) -> None:
    (folder / "models").mkdir()
    (folder / "models" / "__init__.py").write_text("from .net import make\n")
    (folder / "models" / "net.py").write_text("def make(): return 7\n")
    (folder / "mine.py").write_text(f"{line}\n")
    reason = "(ImportError|ModuleNotFoundError): .*; if models is a package of yours, rename it"
    with pytest.raises(UserCodeError, match=rf"mine\.py cannot be imported: {reason}"):
        factories.load_function(factories.function_code("mine.py:make", WHAT), WHAT)


def test_a_wrong_import_from_ours_is_not_taken_for_one_of_a_package_of_theirs(folder: Path) -> None:
    (folder / "mine.py").write_text("from handler.errors import InvalidInputt\n")
    with pytest.raises(UserCodeError) as raised:
        factories.load_module(factories.module_code("mine.py", WHAT), WHAT)
    assert "cannot import name 'InvalidInputt' from 'handler.errors'" in str(raised.value)
    assert str(raised.value).endswith(
        "; if handler is a package of yours, rename it: Cicada has one of that name"
    )


def test_a_file_that_was_changed_since_is_refused(folder: Path) -> None:
    (folder / "mine.py").write_text("def make(): return 7\n")
    code = factories.function_code("mine.py:make", WHAT)
    (folder / "mine.py").write_text("def make(): return 8\n")
    with pytest.raises(UserCodeError, match=r"mine\.py was changed since the model was prepared"):
        factories.load_function(code, WHAT)
    (folder / "mine.py").unlink()
    with pytest.raises(UserCodeError, match=r"mine\.py: No such file"):
        factories.load_function(code, WHAT)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("mine.py", "expected FILE.py:function or package.module:function"),
        ("mine.py:", "expected FILE.py:function"),
        (":make", "expected FILE.py:function"),
        ("absent.py:make", r"absent\.py: No such file"),
        ("no-package:make", "expected FILE.py or package.module"),
        ("no_such_package.net:make", "cannot be imported: ModuleNotFoundError"),
        ("torch.nn:nothing_there", "has nothing named nothing_there, expected a function"),
        ("torch:float32", "has a dtype named float32, expected a function"),
        ("broken.py:make", "cannot be imported: ZeroDivisionError: division by zero"),
        ("exiting.py:make", "cannot be imported: SystemExit: 3"),
        ("syntax.py:make", "cannot be imported: SyntaxError"),
    ],
)
def test_code_that_cannot_be_had_is_told_with_the_reason(
    folder: Path, target: str, reason: str
) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    (folder / "exiting.py").write_text("raise SystemExit(3)\n")
    (folder / "syntax.py").write_text("def make(\n")
    with pytest.raises(UserCodeError, match=f"the factory.*{reason}"):
        factories.load_function(factories.function_code(target, WHAT), WHAT)
