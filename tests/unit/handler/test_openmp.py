"""Only the compute thread enters OpenMP: told by the threads that a handler's process has, and where they may run."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from handler import openmp
from handler.strategies import STRATEGIES
from models import preparation
from models.store import Store

THREADS: Final = 2
RETRIEVALS: Final = 2
DEADLINE_S: Final = 100
PROCESSORS: Final = sorted(os.sched_getaffinity(0))

COUNT: Final = """
import json, os, sys, threading
import torch
from handler.openmp import stay_single_threaded

def tasks():
    return len(os.listdir("/proc/self/task"))

def large_operator():
    torch.ones(1 << 22).mul_(2).sum()
    torch.zeros(1 << 20).erfinv_()  # MKL's, which counts threads for itself

def on_a_thread(work):
    done = threading.Event()
    def run():
        work()
        done.set()
        hold.wait()  # a team lives as long as the thread that it works for
    threading.Thread(target=run, daemon=True).start()
    assert done.wait(60)
    return tasks()

hold = threading.Event()
torch.set_num_threads(THREADS)
"""

REQUESTS: Final = """
import time
from pathlib import Path
from handler.cancellation import Cancellation
from handler.handle import RequestHandler
from handler.pipeline import Pipeline
from handler.scheduler import Durations
from handler.timeline import Timeline
from handler.process import _start_openmp_team
from handler.strategies import STRATEGIES
from handler.unit import UnitThread
from models import catalog
from models.random_weights import RandomWeights
from models.store import Store

root, photo, own_root = map(Path, sys.argv[1:])
stay_single_threaded()
before = tasks()
compute = UnitThread("compute", on_start=_start_openmp_team)
compute.submit(lambda: None).join()
team = tasks() - before - 1
pipeline = Pipeline(retrievals=RETRIEVALS)
handler = RequestHandler(Store(root), pipeline)
own_handler = RequestHandler(Store(own_root), pipeline)
image = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
model = catalog.torchvision_model("resnet18", classes=10)
model.load_state_dict(dict(RandomWeights(catalog.architecture("resnet18", classes=10), 0)))

def forward():
    global expected
    with torch.inference_mode():
        expected = model(image).numpy().tobytes()

compute.submit(forward).join()
counts, equal, kinds = [], [], set()

def ask(handler, strategy, name, input, body):
    header = {"id": "one", "model": name, "version": None, "strategy": strategy, "input": input,
              "outputs": ["logits", "labels"], "top": 5}
    with handler.handling(header, body, time.monotonic_ns(), Cancellation()) as (told, content):
        kinds.add(told["type"])
        if input["kind"] == "tensor":
            equal.append(content == expected)

tensor = {"kind": "tensor", "datatype": "FP32", "shape": list(image.shape)}
for repetition in range(3):
    for strategy in STRATEGIES:
        for name in ("resnet18-safetensors", "resnet18-pth"):
            body = bytearray(image.numpy().tobytes())
            compute.submit(lambda: ask(handler, strategy, name, tensor, body)).join()
            picture = bytearray(photo.read_bytes())
            compute.submit(lambda: ask(handler, strategy, name, {"kind": "image"}, picture)).join()
            counts.append(tasks() - before)
        own = {"kind": "own", "content_type": None, "parameters": {}}
        compute.submit(lambda: ask(own_handler, strategy, "own", own, bytearray(b"any"))).join()
        counts.append(tasks() - before)

class Large:
    # every step but E runs an operator that is large enough for a team
    weighted, bytes, is_mapped = True, 1, True

    def construct(self): large_operator()
    def initialize(self): large_operator()
    def held_bytes(self): return 0
    def retrieval(self, *, in_memory=False): return self
    def step(self): large_operator()
    def apply(self, retrieval): large_operator()
    def execute(self, value): return value

def run_large(strategy):
    timeline = Timeline(["large"] * 4, strategy.decoupled, time.monotonic_ns())
    run = pipeline.begin([Large() for _ in range(4)], strategy, Durations([1] * 4), timeline)
    run.execute(0)
    run.leave()

for strategy in STRATEGIES.values():
    compute.submit(lambda: run_large(strategy)).join()
    counts.append(tasks() - before)
print(json.dumps({"team": team, "counts": counts, "equal": equal, "kinds": sorted(kinds),
                  "with_another_team": on_a_thread(large_operator) - before}))
"""

OWN: Final = """
import torch
from torch import nn

def large_operator():
    torch.ones(1 << 22).mul_(2).sum()
    torch.zeros(1 << 20).erfinv_()

class Large(nn.Linear):
    def forward(self, value):
        large_operator()
        torch.set_num_threads(4)
        return super().forward(value)

def make():
    return Large(4, 2)

def decode(body, content_type, parameters):
    large_operator()
    torch.set_num_threads(4)
    return torch.ones(1, 4)

def encode(outputs, parameters):
    large_operator()
    torch.set_num_threads(4)
    return outputs.tolist()

torch.set_num_threads(4)
"""

PLACED: Final = """
from pathlib import Path
from handler import handle
from handler.cancellation import Cancellation
from handler.pipeline import Pipeline
from handler.process import _start_openmp_team
from handler.unit import UnitThread
from models.store import Store

stay_single_threaded()
compute = UnitThread("compute", on_start=_start_openmp_team)
pipeline = Pipeline(retrievals=RETRIEVALS)
own, built_in = (handle.RequestHandler(Store(Path(root)), pipeline) for root in sys.argv[1:])
execute = handle._executed
all_processors = sorted(os.sched_getaffinity(0))
told = []

def ask(handler, name, input, body):
    header = {"id": "one", "model": name, "version": None, "strategy": "cicada", "top": 5,
              "input": input, "outputs": ["logits"]}
    seen = {}
    def noting(*arguments):
        seen["forward"] = sorted(os.sched_getaffinity(0))
        return execute(*arguments)
    handle._executed = noting
    with handler.handling(header, bytearray(body), 0, Cancellation()) as (answer, content):
        assert answer["type"] == "result", answer
        seen["told"] = json.loads(content) if handler is own else None
    told.append(seen)

def masks():
    return sorted(sorted(os.sched_getaffinity(int(tid))) for tid in os.listdir("/proc/self/task"))

def allow(processors):
    for tid in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(tid), processors)

for processors in (all_processors, all_processors[:1], all_processors):
    if told:
        allow(processors)
    any_input = {"kind": "own", "content_type": None, "parameters": {}}
    compute.submit(lambda: ask(own, "own", any_input, b"any")).join()
    tensor = {"kind": "tensor", "datatype": "FP32", "shape": [1, 3, 64, 64]}
    body = torch.ones(1, 3, 64, 64).numpy().tobytes()
    compute.submit(lambda: ask(built_in, "resnet18-safetensors", tensor, body)).join()
    told[-1]["after"] = masks()
print(json.dumps(told))
"""

PLACES: Final = """
import json
import subprocess
import sys
import threading
import torch
from torch import nn

class Starts(nn.Linear):
    # a thread that stays, a process, and another number of threads
    def forward(self, value):
        global seen
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        asks = "import os; print(sorted(os.sched_getaffinity(0)))"
        seen = json.loads(subprocess.check_output([sys.executable, "-c", asks]))
        torch.set_num_threads(4)
        return super().forward(value)

def make():
    return Starts(4, 2)

def decode(body, content_type, parameters):
    return torch.ones(1, 4)

def encode(outputs, parameters):
    return {"process": seen}
"""

TEAMS: Final = """
before = tasks()
alone = on_a_thread(lambda: (stay_single_threaded(), large_operator())) - before
one_team = on_a_thread(large_operator) - before - alone
print(json.dumps({"alone": alone, "with_team": one_team}))
"""


def run(script: str, *arguments: Path, processors: Sequence[int] = ()) -> Any:
    """What the script printed; `processors`: those that its process may use, without any all."""
    constants = f"THREADS, RETRIEVALS = {THREADS}, {RETRIEVALS}\n"
    if processors:
        constants += f"import os; os.sched_setaffinity(0, {list(processors)})\n"
    ended = subprocess.run(
        [sys.executable, "-c", constants + COUNT + script, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},  # spinning takes long on a loaded machine
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


has_openmp = pytest.mark.skipif(
    not torch.backends.openmp.is_available(),  # type: ignore[no-untyped-call]
    reason="this torch was built without OpenMP",
)


@pytest.fixture
def own_store(tmp_path: Path) -> Store:
    """`own`: a model and a processing of the user's, who sets more threads wherever that can be."""
    return prepared(tmp_path, OWN)


@pytest.fixture
def places_store(tmp_path: Path) -> Store:
    """`own`: a model and a processing of the user's, who tells the processors."""
    return prepared(tmp_path, PLACES)


def prepared(tmp_path: Path, own: str) -> Store:
    code = tmp_path / "own.py"
    code.write_text(own)
    threads = torch.get_num_threads()
    source = preparation.from_factory(f"{code}:make", {}, "1x4", "block", seed=1)
    store = Store(tmp_path / "weights")
    preparation.prepare(store, "own", preparation.with_processing(source, str(code)), "safetensors")
    torch.set_num_threads(threads)
    return store


@has_openmp
@pytest.mark.usefixtures("imports_are_undone")
def test_requests_of_every_strategy_and_format_add_no_thread_to_the_units_and_one_team(
    store: Store, own_store: Store, photo: Path
) -> None:
    told = run(REQUESTS, store.root, photo, own_store.root)

    assert told["team"] == THREADS - 1, "the compute thread's, started before the first request"
    units = 1 + 2 + RETRIEVALS  # compute; layer and weight
    assert set(told["counts"]) == {units + told["team"]}
    assert len(told["counts"]) == (3 * 3 + 1) * len(STRATEGIES)
    assert told["with_another_team"] == units + told["team"] + 1 + (THREADS - 1), (
        "a second team would have shown"
    )
    assert told["kinds"] == ["result"]
    assert all(told["equal"]), "bit for bit with a team, too"


@has_openmp
def test_a_thread_that_stays_single_threaded_starts_no_team_and_leaves_others_theirs() -> None:
    told = run(TEAMS)
    assert told["alone"] == 1
    assert told["with_team"] == 1 + (THREADS - 1)


@has_openmp
@pytest.mark.skipif(len(PROCESSORS) < THREADS, reason="a team of two needs two processors")
@pytest.mark.usefixtures("imports_are_undone")
def test_each_of_a_team_of_two_has_a_processor_and_the_user_s_code_all(
    places_store: Store, store: Store
) -> None:
    """Also when the process's processors are changed while it runs."""
    both = PROCESSORS[:2]
    first, second = ([processor] for processor in both)
    told = run(PLACED, places_store.root, store.root, processors=both)
    for allowed, own, built_in in zip((both, first, both), told[::2], told[1::2], strict=True):
        placed = allowed == both
        assert own == {"forward": allowed, "told": {"process": allowed}}
        assert built_in["forward"] == first
        others = [mask for mask in built_in["after"] if mask != allowed]
        assert others == ([second] if placed else [])


@has_openmp
@pytest.mark.usefixtures("imports_are_undone")
def test_on_a_single_processor_no_team_is_placed(places_store: Store, store: Store) -> None:
    one = PROCESSORS[:1]
    for told in run(PLACED, places_store.root, store.root, processors=one):
        assert told["forward"] == one
        assert all(mask == one for mask in told.get("after", []))


@has_openmp
def test_the_runtime_that_torch_has_loaded_is_found() -> None:
    runtime = openmp._loaded("libgomp", "libomp", "libiomp")
    assert runtime is not None
    assert runtime.omp_get_max_threads() >= 1


def test_without_an_openmp_runtime_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_loaded", lambda *_: None)
    openmp.stay_single_threaded()
