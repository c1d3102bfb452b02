"""`cicada bench latency`: every variant's time for a request, beside the resident forward pass."""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import http_sf
import httpx
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench import checkpoints, environment, http, own, page_cache, payload
from bench.settling import settle
from bench.worker import Worker
from handler.strategies import STRATEGIES
from handler.timeline import now_ns
from models import catalog, preparation
from models.errors import ModelError
from models.manifest import Granularity, WeightFormat
from models.store import Store

USUAL: Final = ("resnet50", "vgg16", "vit_b_16")
RESIDENT: Final = "resident"
DIRECT_READ: Final = "direct_read"
PEERS: Final = {
    "torch_mapped": "bench.peers.torch_mapped",
    "safetensors_mapped": "bench.peers.safetensors_mapped",
    "torchvision_default": "bench.peers.torchvision_default",
}
EXTRA_PEERS: Final = {"onnxruntime_mapped": "bench.peers.onnxruntime_mapped"}
_OPTIMIZED: Final = "_optimized"
_SEED: Final = 0
_WARM_UPS: Final = 2
_HTTP_TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class Options:
    models: Sequence[str]
    strategies: Sequence[str]
    formats: Sequence[WeightFormat]
    granularity: Granularity
    rounds: int
    cold: bool
    peers: bool
    optimized: bool
    """Each strategy also on the model prepared with `--optimize`."""
    http: bool
    """Through the proxy, end to end, instead of straight to a handler."""
    threads: int
    folder: Path | None
    """Where stores and checkpoints are written; they are removed again."""
    own: Sequence[str] = ()
    """Models of the user's, as they are prepared in `store`."""
    store: Path = Path("weights")
    starts: int = 1
    """Of every process, the rounds spread over them: where one's memory lies is good for a tenth, and stays."""


@dataclass(frozen=True, slots=True)
class Row:
    """One variant of one model; milliseconds, and the ratio to the resident forward of the same round."""

    model: str
    variant: str
    format: str | None
    granularity: str | None
    cache: str
    n: int
    median_ms: float
    p95_ms: float
    ratio_to_resident: float
    ratio_to_cold_floor: float | None
    """The ratio to the longer of the resident forward and reading the files past the page cache."""
    http_overhead_ms: float | None
    """Median of the proxy's `total` less the pipeline; None where no proxy was asked."""


class UnknownChoice(ModelError):
    """A name on the command line that names nothing."""


def options(
    *,
    models: Sequence[str],
    strategies: Sequence[str],
    formats: Sequence[str],
    granularity: Granularity,
    rounds: int,
    cold: bool,
    peers: bool,
    optimized: bool,
    http: bool,
    threads: int | None,
    folder: Path | None,
    own: Sequence[str] = (),
    store: Path = Path("weights"),
    starts: int = 1,
) -> Options:
    """Checks the names; `paper` and `all` stand for several. Raises UnknownChoice."""
    return Options(
        models=known_models(models),
        strategies=known_strategies(strategies),
        formats=[
            "pth" if name == "pth" else "safetensors"
            for name in _known("format", formats, ("safetensors", "pth"), {})
        ],
        granularity=granularity,
        rounds=rounds,
        cold=cold,
        peers=peers,
        optimized=optimized,
        http=http,
        threads=threads_or_all(threads),
        folder=folder,
        own=own,
        store=store,
        starts=min(starts, rounds),
    )


def known_models(names: Sequence[str]) -> Sequence[str]:
    """Raises UnknownChoice."""
    return _known("model", names, catalog.NAMES, {"paper": catalog.PAPER})


def known_strategies(names: Sequence[str]) -> Sequence[str]:
    """Raises UnknownChoice."""
    return _known("strategy", names, STRATEGIES, {"all": list(STRATEGIES)})


def threads_or_all(threads: int | None) -> int:
    return threads or len(os.sched_getaffinity(0))


def _known(
    what: str, names: Sequence[str], known: Collection[str], groups: Mapping[str, Sequence[str]]
) -> Sequence[str]:
    chosen = [name for given in names for name in groups.get(given, [given])]
    for name in chosen:
        if name not in known:
            raise UnknownChoice(f"there is no {what} {name!r}: known are {', '.join(known)}")
    return chosen


class Variant(Protocol):
    """Something that takes an input and tells how long that took, in milliseconds."""

    @property
    def name(self) -> str: ...

    @property
    def format(self) -> str | None: ...

    @property
    def granularity(self) -> str | None: ...

    def run(self, value: bytes) -> float: ...


@dataclass(frozen=True, slots=True)
class ServedVariant:
    """A strategy in a handler process: the pipeline's length."""

    name: str
    format: str | None
    granularity: str | None
    worker: Worker
    model: str
    strategy: str
    described: Mapping[str, Any] | None = None
    """What goes in; without it, one image's tensor."""

    def run(self, value: bytes) -> float:
        described = self.described or {
            "kind": "tensor",
            "datatype": "FP32",
            "shape": list(input_shape(self.model)),
        }
        header, _ = self.worker.infer(self.model, self.strategy, dict(described), value)
        duration: float = header["timeline"]["figures"]["pipeline_ms"]
        return duration


@dataclass(frozen=True, slots=True)
class HttpVariant:
    """A strategy behind the proxy, the tensor in binary: the client's time, body sent to answer read.

    overheads: the proxy's `total` less the pipeline of each request, milliseconds.
    """

    name: str
    format: str | None
    granularity: str | None
    client: httpx.Client
    request: payload.Request
    strategy: str
    overheads: list[float] = field(default_factory=list)

    def run(self, _value: bytes) -> float:
        headers = {**self.request.headers, "Cicada-Strategy": self.strategy}
        start = now_ns()
        response = self.client.post(self.request.path, headers=headers, content=self.request.body)
        duration = (now_ns() - start) / 1e6
        response.raise_for_status()
        timing: Any = http_sf.parse(response.headers["Server-Timing"].encode(), tltype="list")
        times = {str(name): float(parameters["dur"]) for name, parameters in timing}
        self.overheads.append(times["total"] - times["pipeline"])
        return duration


@dataclass(frozen=True, slots=True)
class StandIn:
    """The floor or a peer, in a process of its own."""

    name: str
    format: str | None
    granularity: str | None
    worker: Worker
    model: str

    def run(self, value: bytes) -> float:
        described = {"shape": list(input_shape(self.model))}
        header, _ = self.worker.exchange({"type": "infer", "input": described}, value)
        duration: float = header["duration_ms"]
        return duration


@dataclass(frozen=True, slots=True)
class DirectRead:
    """Reading the model's weight files past the page cache: the floor of a cold request."""

    paths: Sequence[Path]
    name: str = DIRECT_READ
    format: str | None = "safetensors"
    granularity: str | None = None

    def run(self, _value: bytes) -> float:
        start = now_ns()
        page_cache.read_direct(self.paths)
        return (now_ns() - start) / 1e6


@dataclass(slots=True)
class Samples:
    """A variant's times in milliseconds, round by round.

    variant: as it was started last. overheads: as in HttpVariant, of these rounds.
    """

    variant: Variant
    times: list[float] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)

    def run(self, value: bytes, *, counts: bool) -> None:
        duration = self.variant.run(value)
        if not counts:
            return
        self.times.append(duration)
        if isinstance(self.variant, HttpVariant):
            self.overheads.append(self.variant.overheads[-1])


def measure(options: Options, progress: Progress) -> Iterator[Row]:
    """Yields the rows of one model after another."""
    for model in options.models:
        with tempfile.TemporaryDirectory(prefix="cicada-bench-", dir=options.folder) as folder:
            yield from _measure_model(model, options, Path(folder), progress)
    for model in options.own:
        yield from _measure_own(model, options, progress)


def _measure_own(model: str, options: Options, progress: Progress) -> Iterator[Row]:
    manifest = own.manifest_of(options.store, model)

    def start(stack: ExitStack) -> Iterator[Variant]:
        page_cache.read_anew(Store(options.store).open(model).path)
        yield own.resident(options.store.absolute(), model, options.threads, stack)
        for strategy in options.strategies:
            worker = Worker.handler(options.store.absolute(), options.threads)
            yield ServedVariant(
                name=strategy,
                format=manifest.weight_format,
                granularity=manifest.granularity,
                worker=stack.enter_context(worker),
                model=model,
                strategy=strategy,
                described=own.described(manifest),
            )

    samples = _run(model, start, own.body(manifest), options, options.store, progress)
    yield from _rows(model, options, samples)


def _run(
    model: str,
    start: Callable[[ExitStack], Iterator[Variant]],
    value: bytes,
    options: Options,
    files: Path,
    progress: Progress,
) -> Sequence[Samples]:
    """All rounds of the variants that `start` starts, the floor first, anew for each part of the rounds.

    Each begins when the processes of the others have come to rest.

    files: the folder whose files are put out of the page cache where it is to be cold.
    """
    samples: list[Samples] = []
    task = progress.add_task(model, total=options.rounds + options.starts * _WARM_UPS)
    for part in range(options.starts):
        rounds = range(part, options.rounds, options.starts)
        with ExitStack() as stack:
            variants = list(start(stack))
            samples = samples or [Samples(variant) for variant in variants]
            for sample, variant in zip(samples, variants, strict=True):
                sample.variant = variant
            for round_number in range(-_WARM_UPS, len(rounds)):
                for sample in samples:
                    settle()
                    if options.cold:
                        page_cache.make_cold(files)
                    sample.run(value, counts=round_number >= 0)
                progress.advance(task)
    progress.remove_task(task)
    return samples


def _measure_model(model: str, options: Options, folder: Path, progress: Progress) -> Iterator[Row]:
    task = progress.add_task(f"{model}: prepare", total=None)
    onnx = options.peers and _has_onnxruntime()
    checkpoints.write(folder / "checkpoints", model, _SEED, onnx=onnx)
    for weight_format in options.formats:
        source = preparation.from_seed(_SEED, model, options.granularity)
        preparation.prepare(Store(folder / weight_format), model, source, weight_format)
        if options.optimized:
            source = preparation.optimized(source, weight_format, options.threads)
            store = Store(folder / f"{weight_format}{_OPTIMIZED}")
            preparation.prepare(store, model, source, weight_format)
    progress.remove_task(task)

    def start(stack: ExitStack) -> Iterator[Variant]:
        return _variants(model, options, folder, stack, onnx=onnx)

    samples = _run(model, start, random_input(model), options, folder, progress)
    yield from _rows(model, options, samples)


def _variants(
    model: str, options: Options, folder: Path, stack: ExitStack, *, onnx: bool
) -> Iterator[Variant]:
    """The floor first; every variant has a process of its own."""
    made = folder / "checkpoints"
    yield stand_in(RESIDENT, "bench.resident", model, made, options.threads, stack)
    served = _behind_the_proxy if options.http else _in_handlers
    yield from served(model, options, folder, stack)
    if options.peers:
        peers = PEERS | (EXTRA_PEERS if onnx else {})
        for name, module in peers.items():
            yield stand_in(name, module, model, made, options.threads, stack)
    if options.cold and "safetensors" in options.formats:
        prepared = Store(folder / "safetensors").open(model)
        yield DirectRead(sorted(prepared.path.glob("*.safetensors")))


def stand_in(
    name: str, module: str, model: str, made: Path, threads: int, stack: ExitStack
) -> StandIn:
    """Starts the floor or a peer; `made` is the folder of its checkpoints."""
    arguments = [
        *("--threads", str(threads)),
        *("--architecture", model),
        *("--checkpoints", str(made)),
    ]
    return StandIn(name, None, None, stack.enter_context(Worker(module, arguments)), model)


def _in_handlers(model: str, options: Options, folder: Path, stack: ExitStack) -> Iterator[Variant]:
    for weight_format, kind in _stores(options):
        for strategy in options.strategies:
            worker = Worker.handler(folder / f"{weight_format}{kind}", options.threads)
            yield ServedVariant(
                name=f"{strategy}{kind}",
                format=weight_format,
                granularity=options.granularity,
                worker=stack.enter_context(worker),
                model=model,
                strategy=strategy,
            )


def _stores(options: Options) -> Iterator[tuple[WeightFormat, str]]:
    """Format and kind of what is measured; together they are the store's folder."""
    for weight_format in options.formats:
        yield weight_format, ""
        if options.optimized:
            yield weight_format, _OPTIMIZED


def _behind_the_proxy(
    model: str, options: Options, folder: Path, stack: ExitStack
) -> Iterator[Variant]:
    sent = payload.request("binary", model, input_shape(model)[-1], None)
    for weight_format, kind in _stores(options):
        for strategy in options.strategies:
            store = folder / f"{weight_format}{kind}"
            service = http.Served(store, queue=1, threads=options.threads)
            url = stack.enter_context(service).url
            yield HttpVariant(
                name=f"{strategy}{kind}",
                format=weight_format,
                granularity=options.granularity,
                client=stack.enter_context(httpx.Client(base_url=url, timeout=_HTTP_TIMEOUT_S)),
                request=sent,
                strategy=strategy,
            )


def _has_onnxruntime() -> bool:
    try:
        import onnxruntime  # noqa: F401, PLC0415
        import onnxscript  # noqa: F401, PLC0415
    except ImportError:
        return False
    return True


def input_shape(model: str) -> tuple[int, int, int, int]:
    """Of one image as torchvision's weights of that model take it."""
    side = catalog.usual_image_size(model)
    return (1, 3, side, side)


def random_input(model: str = USUAL[0]) -> bytes:
    """A seeded float32 tensor of one image as the model takes it, as bytes."""
    generator = np.random.default_rng(_SEED)
    return generator.standard_normal(input_shape(model), dtype=np.float32).tobytes()


def _rows(model: str, options: Options, samples: Sequence[Samples]) -> Iterator[Row]:
    resident = samples[0].times
    direct = next((s.times for s in samples if s.variant.name == DIRECT_READ), None)
    for sample in samples:
        ratios = [mine / floor for mine, floor in zip(sample.times, resident, strict=True)]
        yield Row(
            model=model,
            variant=sample.variant.name,
            format=sample.variant.format,
            granularity=sample.variant.granularity,
            cache="cold" if options.cold else "warm",
            n=len(sample.times),
            median_ms=statistics.median(sample.times),
            p95_ms=float(np.percentile(sample.times, 95)),
            ratio_to_resident=statistics.median(ratios),
            ratio_to_cold_floor=None if direct is None else _over_both(sample, resident, direct),
            http_overhead_ms=statistics.median(sample.overheads) if sample.overheads else None,
        )


def _over_both(sample: Samples, resident: Sequence[float], direct: Sequence[float]) -> float:
    rounds = zip(sample.times, resident, direct, strict=True)
    return statistics.median(mine / max(floors) for mine, *floors in rounds)


def table(rows: Sequence[Row]) -> Table:
    """The rows as they are printed, with the geometric mean of each variant's ratios."""
    printed = Table("model", "variant", "format", "n", "median ms", "p95 ms", "x resident")
    cold = any(row.ratio_to_cold_floor is not None for row in rows)
    if cold:
        printed.add_column("x cold floor")
    through_proxy = any(row.http_overhead_ms is not None for row in rows)
    if through_proxy:
        printed.add_column("total - pipeline ms")
    for column in printed.columns[3:]:
        column.justify = "right"
    for row in rows:
        printed.add_row(
            row.model,
            row.variant,
            row.format or "",
            str(row.n),
            f"{row.median_ms:.1f}",
            f"{row.p95_ms:.1f}",
            f"{row.ratio_to_resident:.3f}",
            *([_optional(row.ratio_to_cold_floor)] if cold else []),
            *([_optional(row.http_overhead_ms)] if through_proxy else []),
        )
    if len({row.model for row in rows}) > 1:
        printed.add_section()
        for (variant, weight_format), mean in geometric_means(rows).items():
            printed.add_row(
                "geometric mean", variant, weight_format or "", "", "", "", f"{mean:.3f}"
            )
    return printed


def _optional(figure: float | None) -> str:
    return "" if figure is None else f"{figure:.2f}"


def geometric_means(rows: Sequence[Row]) -> dict[tuple[str, str | None], float]:
    """Of the ratios to resident over the models, for each variant and format."""
    ratios: dict[tuple[str, str | None], list[float]] = {}
    for row in rows:
        ratios.setdefault((row.variant, row.format), []).append(row.ratio_to_resident)
    return {key: statistics.geometric_mean(values) for key, values in ratios.items()}


def run(options: Options, json_file: Path | None) -> None:
    """Measures, prints the table and writes the figures."""
    console = Console()
    rows: list[Row] = []
    described = environment.describe(options.threads, " ".join(["cicada", *sys.argv[1:]]))
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for row in measure(options, progress):
            rows.append(row)
            if json_file is not None:
                _write(json_file, described, rows)
    console.print(table(rows))


def _write(path: Path, described: dict[str, Any], rows: Sequence[Row]) -> None:
    """Whole or not at all: a run may be interrupted."""
    partial = path.with_name(f"{path.name}.partial")
    content = {"environment": described, "rows": [asdict(row) for row in rows]}
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
