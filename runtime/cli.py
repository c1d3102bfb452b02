"""The `cicada` command: which commands there are. Their work is done by modules imported when they run.

Nothing heavy is imported here: `cicada --help` and `cicada serve` never load torch.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, NoReturn

import typer
from typer.core import TyperCommand

from models.errors import ModelError

if TYPE_CHECKING:
    from models.manifest import Precision
    from runtime.settings import Settings

app = typer.Typer(
    help="Serve image classification, and torch models of your own, from containers that keep no "
    "model in memory.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Weights = Annotated[
    Path | None,
    typer.Option("--weights", metavar="DIR", help="The weight store [env: CICADA_WEIGHTS]."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
BenchedModels = Annotated[
    str, typer.Option(metavar="NAMES", help="Comma-separated; `paper`: the paper's ten.")
]
Threads = Annotated[int | None, typer.Option(min=1, help="By default all cores.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the figures there.")
]
Folder = Annotated[Path | None, typer.Option(help="Where stores are made, and removed again.")]

DEFAULT_PRETRAINED: Final = "DEFAULT"

_PRECISIONS: Final[dict[str, "Precision"]] = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float64": "F64",
}


class OptionalWeightsCommand(TyperCommand):
    """A command whose `--pretrained` may stand alone.

    typer has no options with an optional value. torchvision's weights are named in capitals and
    models never are, so the word after `--pretrained` tells by itself whether it is the value.
    """

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        return super().parse_args(ctx, list(_with_default_weights(args)))


def _with_default_weights(arguments: list[str]) -> Iterator[str]:
    following = [*arguments[1:], ""]
    for argument, after in zip(arguments, following, strict=True):
        yield argument
        if argument == "--pretrained" and re.fullmatch(r"[A-Z][A-Z0-9_]*", after) is None:
            yield DEFAULT_PRETRAINED


@contextmanager
def _errors_as_one_sentence() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        _fail(str(error))
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}")


def _fail(sentence: str, status: int = 1) -> NoReturn:
    typer.echo(f"cicada: {sentence}", err=True)
    raise typer.Exit(status)


def _settings(weights: Path | None) -> "Settings":
    from runtime.settings import Settings, SettingsError

    try:
        return Settings() if weights is None else Settings(weights=weights)
    except SettingsError as error:
        _fail(str(error), status=2)


@app.command(cls=OptionalWeightsCommand)
def prepare(
    name: Annotated[
        str | None, typer.Argument(help="The model's name in the store.", show_default=False)
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Take the weights from a state dict, .pth or safetensors."
        ),
    ] = None,
    random: Annotated[
        int | None,
        typer.Option(metavar="SEED", help="Make random weights: for timings, not for labels."),
    ] = None,
    pretrained: Annotated[
        str | None,
        typer.Option(
            metavar="[WEIGHTS]", help="Download torchvision's weights, by default its best."
        ),
    ] = None,
    all_pretrained: Annotated[
        bool,
        typer.Option("--all-pretrained", help="Download the paper's ten, each under its own name."),
    ] = False,
    architecture: Annotated[
        str | None,
        typer.Option(
            metavar="ARCH",
            help="The torchvision model, if NAME is not its name; of a checkpoint it is recognized.",
        ),
    ] = None,
    granularity: Annotated[
        Literal["stage", "block"], typer.Option(help="How finely the model is cut into layers.")
    ] = "block",
    weight_format: Annotated[
        Literal["safetensors", "pth"], typer.Option("--format", help="Format of the weight files.")
    ] = "safetensors",
    key: Annotated[
        str | None,
        typer.Option(help="Where in the checkpoint the state dict lies, if there are several."),
    ] = None,
    optimize: Annotated[
        bool,
        typer.Option(
            "--optimize",
            help="Fuse convolutions, if that measures faster here: equal within 1e-4, not bit for bit.",
        ),
    ] = False,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16", "float64"],
        typer.Option(help="Type of the weights, and of the computation."),
    ] = "float32",
    labels: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Class names: one a line, or a JSON list or index map."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(metavar="WEIGHTS", help="Prepare images as for these torchvision weights."),
    ] = None,
    resize: Annotated[
        str | None,
        typer.Option(metavar="N|HxW", help="Resize the shorter side to N pixels, or both sides."),
    ] = None,
    crop: Annotated[
        int | None, typer.Option(min=1, help="Then cut this square from the centre.")
    ] = None,
    mean: Annotated[
        str | None, typer.Option(metavar="R,G,B", help="Subtract this, in units of 0 to 1.")
    ] = None,
    std: Annotated[str | None, typer.Option(metavar="R,G,B", help="Then divide by this.")] = None,
    interpolation: Annotated[
        Literal["nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos"]
        | None,
        typer.Option(help="How to resize."),
    ] = None,
    factory: Annotated[
        str | None,
        typer.Option(
            metavar="CODE:FUNCTION",
            help="Your function that makes the model: FILE.py:function or package.module:function.",
        ),
    ] = None,
    kwargs: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Its keyword arguments, an object."),
    ] = None,
    example: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="What its model takes: 1x3x224x224, or ids=1x16:int64,mask=1x16:int64.",
        ),
    ] = None,
    processing: Annotated[
        str | None,
        typer.Option(
            metavar="CODE",
            help="Your module with decode and encode: FILE.py or package.module.",
        ),
    ] = None,
    weights: Weights = None,
) -> None:
    """Put a model into the weight store, from exactly one of a checkpoint, a seed or torchvision."""
    sources = {
        "--checkpoint": checkpoint,
        "--random": random,
        "--pretrained": pretrained,
        "--all-pretrained": all_pretrained or None,
    }
    given = [option for option, value in sources.items() if value is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise typer.BadParameter(f"expected exactly one of {', '.join(sources)}, found {found}")
    if key is not None and checkpoint is None:
        raise typer.BadParameter("--key belongs to --checkpoint")
    own = (architecture, labels, preset, resize, crop, mean, std, interpolation)
    if all_pretrained and any(value is not None for value in (name, *own)):
        raise typer.BadParameter(
            "--all-pretrained takes no NAME, and of the model's options only --granularity, --format, "
            "--dtype and --optimize"
        )
    if optimize and dtype != "float32":
        raise typer.BadParameter("--optimize is for --dtype float32")
    if name is None and not all_pretrained:
        raise typer.BadParameter("expected the NAME that the model gets in the store")
    _check_factory(
        factory,
        {"--example": example, "--kwargs": kwargs},
        {
            "--architecture": architecture,
            "--pretrained": pretrained,
            "--all-pretrained": all_pretrained or None,
            "--dtype": None if dtype == "float32" else dtype,
            "--preset": preset,
            "--resize": resize,
            "--crop": crop,
            "--mean": mean,
            "--std": std,
            "--interpolation": interpolation,
        },
    )
    from models.preparation import Options
    from models.preprocessing import Changes
    from runtime import preparation

    with _errors_as_one_sentence():
        changes = Changes(
            _sides(resize), crop, _three("--mean", mean), _three("--std", std), interpolation
        )
        options = Options(_PRECISIONS[dtype], labels, preset, changes)
        if name is None:
            preparation.prepare_all_pretrained(
                _settings(weights).weights,
                granularity=granularity,
                weight_format=weight_format,
                optimize=optimize,
                options=options,
            )
            return
        preparation.prepare(
            _settings(weights).weights,
            name,
            architecture=architecture,
            checkpoint=checkpoint,
            key=key,
            seed=random,
            pretrained=pretrained,
            granularity=granularity,
            weight_format=weight_format,
            optimize=optimize,
            options=options,
            factory=factory,
            kwargs=kwargs,
            example=example,
            processing=processing,
        )


def _check_factory(
    factory: str | None, its: Mapping[str, object], torchvisions: Mapping[str, object]
) -> None:
    """its, torchvisions: what was given for a factory's models alone, and for torchvision's."""
    if factory is not None and its["--example"] is None:
        raise typer.BadParameter("--factory needs --example, such as --example 1x3x224x224")
    for option, value in (its if factory is None else torchvisions).items():
        if value is not None:
            raise typer.BadParameter(
                f"{option} belongs to --factory"
                if factory is None
                else f"{option} is for torchvision's models, expected it without --factory"
            )


def _sides(resize: str | None) -> int | tuple[int, int] | None:
    if resize is None:
        return None
    found = re.fullmatch(r"([0-9]{1,5})(?:x([0-9]{1,5}))?", resize)
    if found is None:
        raise typer.BadParameter(f"--resize {resize}: expected pixels, 256 or 256x256")
    return int(found[1]) if found[2] is None else (int(found[1]), int(found[2]))


def _three(option: str, text: str | None) -> tuple[float, float, float] | None:
    if text is None:
        return None
    try:
        red, green, blue = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} {text}: expected three numbers, 0.5,0.5,0.5") from None
    return red, green, blue


@app.command()
def inspect(
    name: Annotated[str | None, typer.Argument(help="One model; without it, all.")] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Check every file's size and hash, and run code of yours; exit 1 on a finding.",
        ),
    ] = False,
    as_json: AsJson = False,
    weights: Weights = None,
) -> None:
    """Show the models in the weight store, or one model's layers and files."""
    from runtime import inspection

    with _errors_as_one_sentence():
        sound = inspection.inspect(_settings(weights).weights, name, verify=verify, as_json=as_json)
    if not sound:
        raise typer.Exit(1)


@app.command()
def remove(
    name: Annotated[str, typer.Argument(help="The model's name in the store.")],
    weights: Weights = None,
) -> None:
    """Remove a model and all its versions from the weight store."""
    from runtime import inspection

    with _errors_as_one_sentence():
        inspection.remove(_settings(weights).weights, name)


@app.command()
def serve(
    weights: Weights = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check every file's hash first [env: CICADA_VERIFY].")
    ] = False,
) -> None:
    """Serve the models over HTTP; settings come from the environment (CICADA_*, HOST, PORT)."""
    from runtime import signals

    signals.end_at_once()
    from runtime.server import serve as run
    from runtime.settings import SettingsError

    settings = _settings(weights)
    if verify:
        settings = settings.model_copy(update={"verify": True})
    try:
        run(settings)
    except SettingsError as error:
        _fail(str(error), status=2)


@app.command()
def health() -> None:
    """Whether the service with these settings, on this machine, is ready; exit 1 if it is not."""
    from runtime.health import why_not_ready

    reason = why_not_ready(_settings(None))
    if reason is not None:
        _fail(reason)


@app.command()
def invoke(
    image: Annotated[Path, typer.Argument(help="An image file.")],
    model: Annotated[str | None, typer.Option(help="By default the service's.")] = None,
    strategy: Annotated[str | None, typer.Option(help="By default the service's.")] = None,
    url: Annotated[str | None, typer.Option(help="The service [http://127.0.0.1:PORT].")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many labels.")] = 5,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="One of the service's CICADA_API_KEYS.")
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="Also draw the request's timeline.")
    ] = False,
) -> None:
    """Send an image to a running service; print its labels and where the time went."""
    from runtime.invocation import invoke as run

    run(
        image,
        model=model,
        strategy=strategy,
        url=url,
        top=top,
        api_key=api_key,
        timeline=timeline,
    )


@app.command()
def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            help="A trace, .csv, .txt or .gz, in the schema of Azure's of 2021; "
            "without one, a synthetic hour."
        ),
    ] = None,
    url: Annotated[str | None, typer.Option(help="The service [http://127.0.0.1:PORT].")] = None,
    models: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Comma-separated; `paper`: those of the paper's ten it serves."
        ),
    ] = "paper",
    strategy: Annotated[str | None, typer.Option(help="By default the service's.")] = None,
    day: Annotated[int, typer.Option(min=1, help="Of the trace, from 1.")] = 14,
    hour: Annotated[int, typer.Option(min=0, max=23, help="Of that day.")] = 0,
    minutes: Annotated[int, typer.Option(min=1, max=1440, help="From that hour on.")] = 60,
    speedup: Annotated[float, typer.Option(min=0.01, help="How much faster than it was.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of which model stands for a function.")] = 0,
    in_flight: Annotated[
        int, typer.Option(min=1, help="More are not sent, and count as errors.")
    ] = 256,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for an answer.")] = 60.0,
    synthetic_seed: Annotated[int, typer.Option(min=0, help="Of the synthetic hour.")] = 0,
    dispersion: Annotated[
        float, typer.Option(min=1, help="Of the synthetic hour: how bursty by minute.")
    ] = 10.0,
    api_key: Annotated[
        str | None, typer.Option(metavar="KEY", help="One of the service's CICADA_API_KEYS.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where the figures go.")] = Path(
        "replay"
    ),
) -> None:
    """Drive a running service with a trace's invocations, each sent when it is due; latencies and cost."""
    from bench.replay import command
    from bench.replay.synthetic import Shape
    from bench.replay.trace import Window

    with _errors_as_one_sentence():
        command.run(
            command.Options(
                trace=trace,
                window=Window(day, hour, minutes),
                shape=Shape(seed=synthetic_seed, dispersion=dispersion),
                url=(url or f"http://127.0.0.1:{_settings(None).port}").rstrip("/"),
                models=command.named(models),
                any_of_them=models == command.PAPER,
                strategy=strategy,
                seed=seed,
                speedup=speedup,
                in_flight=in_flight,
                timeout_s=timeout,
                api_key=api_key,
                folder=out,
            )
        )


bench_app = typer.Typer(
    help="Measure: every figure that the documentation claims.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")


@bench_app.command()
def latency(
    models: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Comma-separated; `paper`: the paper's ten."),
    ] = None,
    own: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Models of yours in the store, made by factories."),
    ] = None,
    strategies: Annotated[
        str, typer.Option(metavar="NAMES", help="Comma-separated; `all`: all five.")
    ] = "all",
    formats: Annotated[
        str, typer.Option(metavar="NAMES", help="Comma-separated: safetensors, pth.")
    ] = "safetensors",
    granularity: Annotated[Literal["stage", "block"], typer.Option()] = "block",
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each variant.")] = 15,
    starts: Annotated[
        int, typer.Option(min=1, help="Of every process; the rounds are spread over them.")
    ] = 3,
    cache: Annotated[
        Literal["warm", "cold"], typer.Option(help="Whether the files are in the page cache.")
    ] = "warm",
    peers: Annotated[
        bool, typer.Option("--peers", help="Also what one would write, or use, instead.")
    ] = False,
    optimized: Annotated[
        bool, typer.Option("--optimized", help="Also the models prepared with `--optimize`.")
    ] = False,
    http: Annotated[
        bool, typer.Option("--http", help="Through the proxy, tensors in binary.")
    ] = False,
    threads: Threads = None,
    json_file: JsonFile = None,
    folder: Folder = None,
    weights: Weights = None,
) -> None:
    """Time requests of every variant, in turn round by round, beside the resident forward pass."""
    from bench import latency

    with _errors_as_one_sentence():
        latency.run(
            latency.options(
                models=models.split(",") if models else [] if own else list(latency.USUAL),
                strategies=strategies.split(","),
                formats=formats.split(","),
                granularity=granularity,
                rounds=rounds,
                cold=cache == "cold",
                peers=peers,
                optimized=optimized,
                http=http,
                threads=threads,
                folder=folder,
                own=own.split(",") if own else [],
                store=_settings(weights).weights,
                starts=starts,
            ),
            json_file,
        )


@bench_app.command()
def memory(
    models: BenchedModels = "resnet50,vgg16,vit_b_16",
    rounds: Annotated[int, typer.Option(min=1, help="Requests of each model.")] = 7,
    handlers: Annotated[int, typer.Option(min=1, help="Handlers at work at once.")] = 2,
    threads: Threads = None,
    json_file: JsonFile = None,
    folder: Folder = None,
) -> None:
    """Measure memory: a request's beside the resident forward pass's, and what handlers share."""
    from bench import latency, memory

    with _errors_as_one_sentence():
        memory.run(
            memory.Options(
                models=latency.known_models(models.split(",")),
                rounds=rounds,
                handlers=handlers,
                threads=latency.threads_or_all(threads),
                folder=folder,
            ),
            json_file,
        )


@bench_app.command()
def http(
    model: Annotated[str, typer.Option(help="A torchvision model.")] = "resnet50",
    kinds: Annotated[
        str, typer.Option(metavar="NAMES", help="Comma-separated: image, binary, json.")
    ] = "image,binary,json",
    clients: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Comma-separated numbers of concurrent clients.")
    ] = "1,4,16,64",
    seconds: Annotated[float, typer.Option(min=0, help="Per row, at most.")] = 10.0,
    requests: Annotated[int, typer.Option(min=1, help="Per row, at most.")] = 2000,
    image: Annotated[Path | None, typer.Option(help="By default one is made.")] = None,
    json_file: JsonFile = None,
    folder: Folder = None,
) -> None:
    """Load a service of its own with concurrent clients: rates, latencies, and health meanwhile."""
    from bench import http

    with _errors_as_one_sentence():
        http.run(
            http.options(
                model=model,
                kinds=kinds.split(","),
                clients=clients.split(","),
                seconds=seconds,
                requests=requests,
                image=image,
                folder=folder,
            ),
            json_file,
        )


@bench_app.command()
def preparation(
    models: Annotated[
        str, typer.Option(metavar="NAMES", help="Comma-separated torchvision models.")
    ] = "vit_l_16",
    formats: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Comma-separated: zip, legacy, safetensors, training, training-legacy.",
        ),
    ] = "zip,legacy,safetensors",
    dtypes: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Comma-separated types of the checkpoint's weights."),
    ] = "float32",
    json_file: JsonFile = None,
    folder: Folder = None,
) -> None:
    """Measure the memory of the process that prepares a checkpoint, beside the file's size."""
    from bench import preparation

    with _errors_as_one_sentence():
        preparation.run(
            preparation.options(models.split(","), formats.split(","), dtypes.split(","), folder),
            json_file,
        )


@bench_app.command()
def paper(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where data and report go.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Three models, few rounds: some minutes.")
    ] = False,
    models: Annotated[
        str | None, typer.Option(metavar="NAMES", help="By default the paper's ten.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="By default 10; quick: 2.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="By default a synthetic hour.")
    ] = None,
    day: Annotated[int, typer.Option(min=1, help="Of the trace, from 1.")] = 14,
    hour: Annotated[int, typer.Option(min=0, max=23, help="Of that day.")] = 0,
    replay_strategies: Annotated[
        str | None, typer.Option(metavar="NAMES", help="By default all; quick: pisel, cicada.")
    ] = None,
    replay_minutes: Annotated[
        int | None, typer.Option(min=1, max=60, help="Of the hour, each; by default 5; quick: 1.")
    ] = None,
    replay_speedup: Annotated[
        float | None, typer.Option(min=0.01, help="By default 1; quick: 2.")
    ] = None,
    density_models: Annotated[
        str | None, typer.Option(metavar="NAMES", help="By default one of each family; `none`.")
    ] = None,
    memory_limit: Annotated[
        float, typer.Option(min=0.5, metavar="GB", help="Of the density section.")
    ] = 2.0,
    cold_models: Annotated[
        str | None, typer.Option(metavar="NAMES", help="By default all; quick: one; `none`.")
    ] = None,
    cold_rounds: Annotated[int | None, typer.Option(min=1, help="By default 5; quick: 1.")] = None,
    disk_limit: Annotated[
        float, typer.Option(min=1, metavar="MB/S", help="Of the cold section's slower disk.")
    ] = 200.0,
    threads: Threads = None,
    folder: Annotated[
        Path | None, typer.Option(help="Where stores are made [DIR]; removed when it is over.")
    ] = None,
) -> None:
    """Measure the paper's evaluation again: data, plots, one HTML report. Goes on where it was interrupted."""
    from bench.paper import command
    from bench.replay.trace import Window

    with _errors_as_one_sentence():
        command.run(
            command.choices(
                quick=quick,
                models=_names(models),
                rounds=rounds,
                threads=threads,
                trace_file=trace,
                window=Window(day, hour, minutes=60),
                replay_strategies=_names(replay_strategies),
                replay_minutes=replay_minutes,
                replay_speedup=replay_speedup,
                density_models=_names(density_models),
                memory_limit_gb=memory_limit,
                cold_models=_names(cold_models),
                cold_rounds=cold_rounds,
                disk_mb_per_s=disk_limit,
            ),
            out,
            folder,
            trace,
        )


def _names(given: str | None) -> list[str] | None:
    return None if given is None else given.split(",")


def main() -> None:
    app(prog_name="cicada")


if __name__ == "__main__":
    main()
