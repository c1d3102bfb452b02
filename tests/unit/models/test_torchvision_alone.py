"""torchvision without torch's compiler, each time in an interpreter of its own."""

import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from models import preparation
from models.manifest import WeightFormat
from models.store import Store


def run(script: str, *arguments: str) -> None:
    command = [sys.executable, "-W", "error", "-c", dedent(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_handler_that_has_answered_images_under_every_strategy_has_no_compiler(
    tmp_path: Path, photo: Path
) -> None:
    script = """
        import sys, time
        from pathlib import Path
        import handler.process
        from handler.cancellation import Cancellation
        from handler.handle import RequestHandler
        from handler.pipeline import Pipeline
        from handler.strategies import STRATEGIES
        from models.store import Store

        store = Store(Path(sys.argv[1]))
        pipeline = Pipeline(retrievals=2)
        requests = RequestHandler(store, pipeline)
        body = Path(sys.argv[2]).read_bytes()
        for model in store.names():
            for strategy in STRATEGIES:
                now = time.monotonic_ns()
                header = dict(type="infer", id="one", model=model, version=None, strategy=strategy)
                header |= dict(received_ns=now, input={"kind": "image"}, outputs=["labels"], top=5)
                with requests.handling(header, bytearray(body), now, Cancellation()) as (told, _):
                    assert told["type"] == "result", told
        pipeline.close()
        assert "torchvision" in sys.modules
        assert not {"torch._dynamo", "sympy"} & set(sys.modules)
    """
    store = Store(tmp_path)
    formats: dict[str, WeightFormat] = {
        "resnet18": "pth",
        "vit_b_32": "safetensors",
        "squeezenet1_1": "safetensors",
    }
    for name, weight_format in formats.items():
        source = preparation.from_seed(0, name, "block")
        preparation.prepare(store, name, source, weight_format)
    run(script, str(tmp_path), str(photo))


def test_who_wants_the_compiler_gets_it() -> None:
    run("""
        import models, torchvision, inspect, sys
        import torch
        assert "torch._dynamo" not in sys.modules
        assert "__version__" in inspect.getsource(torchvision)
        import torch._dynamo
        assert torch._dynamo.utils.is_compile_supported("cpu") in (True, False)
        assert torch._dynamo.optimize
        double = torch.compile(lambda value: value * 2, backend="eager")
        assert double(torch.ones(1)).item() == 2
    """)


def test_the_one_function_of_it_answers_as_it_does() -> None:
    run("""
        import models, sys, torch, torchvision

        def pooled():
            images = torch.arange(48.0).reshape(1, 3, 4, 4)
            return torchvision.ops.roi_align(images, [torch.tensor([[0.0, 0.0, 3.0, 3.0]])], 2)

        expected = pooled()
        assert "torch._dynamo" not in sys.modules
        roi_align = sys.modules["torchvision.ops.roi_align"]
        for device in ("cpu", "cuda", "meta"):
            found = roi_align.is_compile_supported(device)
            assert found == torch._dynamo.utils.is_compile_supported(device)
        assert torch.equal(pooled(), expected)
    """)


def test_a_compiler_that_is_there_already_is_used() -> None:
    run("""
        import models, sys, torch._dynamo, torchvision
        roi_align = sys.modules["torchvision.ops.roi_align"]
        assert roi_align.is_compile_supported is torch._dynamo.utils.is_compile_supported
    """)


def test_a_torchvision_that_takes_more_of_the_compiler_gets_the_compiler_itself(
    tmp_path: Path,
) -> None:
    """A stand-in for a version to come, found before the installed one."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from torch._dynamo import optimize\n"
        "from torch._dynamo.utils import counters, is_compile_supported\n"
    )
    script = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import models, torchvision, torch._dynamo
        assert torchvision.__file__.startswith(sys.argv[1])
        assert torchvision.optimize is torch._dynamo.optimize
        assert torchvision.counters is torch._dynamo.utils.counters
        assert torchvision.is_compile_supported("cpu") in (True, False)
        assert not isinstance(torch._dynamo.__path__, list) or torch._dynamo.__path__
    """
    run(script, str(tmp_path))
