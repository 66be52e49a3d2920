"""The command line.

    quire chat      chat with a language model that runs on quire
    quire serve     serve a model by OpenAI's interface, with a page that shows its pages
    quire tour      run that model with a paged cache, and draw its pages, in a minute or two
    quire demo      draw, check and measure a mod beside PyTorch, in under a minute
    quire doctor    print versions, CPU, threads, cache and backends of this machine
    quire show      print the graph, the code and the assembly of a mod
    quire draw      draw which keys a mask lets each query read, or what a score_mod computes
    quire why       print each step of a mod at one position
    quire walk      print which files of quire a call enters
    quire cache     print or remove the compiled kernels on disk

A command is a function below. Only the `quire` command imports this module, and with it rich and
typer. The exit status is 1 if a check of the demo fails, and 2 for a wrong argument,
which is reported without a traceback.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quire import __version__
from quire.api.why import why
from quire.draw import draw
from quire.errors import MissingPackageError, QuireError
from quire.runtime.cache import object_cache
from quire.tools import demo, show, walk
from quire.tools.colour import coloured
from quire.tools.doctor import report

Place = Annotated[
    str,
    typer.Argument(metavar="FILE.py:NAME|MODULE:NAME", help="A mod in a file, or in a module."),
]
Batch = Annotated[int, typer.Option("--b", min=0, help="The batch.")]
Head = Annotated[int, typer.Option("--h", min=0, help="The head.")]
Score = Annotated[float, typer.Option(help="The score that a score_mod gets.")]

app = typer.Typer(
    help="Attention that you program in plain Python, on any CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cache = typer.Typer(help="The compiled kernels on disk: info, clear.", no_args_is_help=True)
app.add_typer(cache, name="cache")


def main() -> None:
    """Run the `quire` command."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        app()
    except QuireError as error:
        print(f"quire: {_in_options(str(error))}", file=sys.stderr)
        sys.exit(2)


def _in_options(message: str) -> str:
    """Replace names of arguments in a message by those of command line options."""
    for name in ("q_len", "kv_len", "block_size"):
        option = f"--{name.replace('_', '-')}"
        message = re.sub(rf"\b{name}=", f"{option} ", message)
        message = re.sub(rf"\b{name}\b", option, message)
    return message


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        typer.echo(f"quire {__version__}")
        raise typer.Exit


@app.command("demo")
def show_demo(
    tokens: Annotated[int, typer.Option(min=16, help="Length of the sequence.")] = 4096,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure each row.")] = 3.0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of PyTorch and of quire.")] = 1,
) -> None:
    """Draw, check and measure a mod of three lines beside PyTorch, in under a minute."""
    if not demo.run(Console(highlight=False), tokens, seconds, threads):
        raise typer.Exit(1)


New = Annotated[int, typer.Option(min=8, help="Tokens of each answer, at most.")]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads. By default as many as torch uses.")
]


@app.command()
def chat(new: New = 256, threads: Threads = None) -> None:
    """Chat with a language model that runs on quire: type a line, and it answers."""
    _prepare("chat", threads)
    from quire.tools.demo import chat_screen

    chat_screen.run(Console(highlight=False), new)


@app.command()
def serve(
    model: Annotated[
        str, typer.Argument(help="A folder with a model, a name of the hub, or the embedded one.")
    ] = "SmolLM2-135M-Instruct",
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any free port.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name for clients.")] = None,
    weights: Annotated[
        str, typer.Option(metavar="float32|bfloat16|int8|...", help="Of linear layers.")
    ] = "float32",
    max_bytes: Annotated[
        str, typer.Option(metavar="2GB|512MB|...", help="Memory of keys and values.")
    ] = "1GB",
    mask: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="A mask_mod for all requests.")
    ] = None,
    score_mod: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="A score_mod for all requests.")
    ] = None,
    api_key: Annotated[
        list[str] | None, typer.Option(help="A key that clients must send; may be repeated.")
    ] = None,
    api_keys: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file with a key in each line.")
    ] = None,
    allow_host: Annotated[
        list[str] | None, typer.Option(help="A name by which clients may call the server.")
    ] = None,
    lookup: Annotated[
        bool, typer.Option(help="Guess tokens from the text: faster where answers quote it.")
    ] = False,
    max_ongoing: Annotated[
        int, typer.Option(min=1, help="Answers that run or wait; more are told to come again.")
    ] = 256,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds of a request.")] = 600.0,
    read_limit: Annotated[float, typer.Option(min=0.1, help="Until it has arrived.")] = 30.0,
    replicas: Annotated[
        int, typer.Option(min=0, help="Processes of the model, on Ray; 0 is this one alone.")
    ] = 0,
    threads: Threads = None,
) -> None:
    """Serve a model by OpenAI's interface, with a page that shows its pages."""
    _prepare("serve", threads)
    from quire.serve import command
    from quire.serve.options import Options, num_bytes

    command.serve(
        Options(
            model=model,
            host=host,
            port=port,
            name=name,
            weights=weights,
            max_bytes=num_bytes(max_bytes),
            mask=mask,
            score_mod=score_mod,
            api_keys=api_key or (),
            api_keys_file=None if api_keys is None else str(api_keys.absolute()),
            allowed_hosts=tuple(allow_host or ()),
            lookup=lookup,
            max_ongoing=max_ongoing,
            time_limit=time_limit,
            read_limit=read_limit,
            replicas=replicas,
            threads=threads,
        ),
    )


@app.command()
def tour(
    new: New = 48,
    threads: Threads = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="For pictures.")
    ] = None,
) -> None:
    """Run a language model with a paged cache: a batch, its pages, shared samples, a mod."""
    _prepare("tour", threads)
    from quire.tools.demo import tour_screen

    folder = Path(tempfile.mkdtemp(prefix="quire-")) if output is None else output
    tour_screen.run(Console(highlight=False), folder, new)


def _prepare(command: str, threads: int | None) -> None:
    """Check that transformers is installed, and set the number of threads."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingPackageError(
            f"the package transformers must be installed for {command}, but is not. Install it: "
            f"pip install 'quire[models]'."
        )
    if threads is not None:
        torch.set_num_threads(threads)


@app.command()
def doctor() -> None:
    """Print versions, CPU, threads, cache and backends of this machine."""
    _print_rows(report())


@app.command("show")
def show_mod(
    place: Place,
    kind: Annotated[
        str | None, typer.Option(metavar="score|mask", help="By default its signature decides.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the queries.")] = "float32",
    target: Annotated[
        str,
        typer.Option(
            metavar="x86-64-v3|x86-64-v4|aarch64|host",
            help="The processor. A width of vectors may follow, as in x86-64-v3:512.",
        ),
    ] = "host",
    stage: Annotated[
        str, typer.Option(metavar="graph|llvm|asm|STEP|all", help="One stage can be piped.")
    ] = "all",
) -> None:
    """Print a mod step by step: its graphs, the code that is generated for it, its assembly."""
    console = Console(highlight=False)
    show.run(console, place, kind=kind, dtype=dtype, target=target, stage=stage)


@app.command("draw")
def draw_mod(
    place: Place,
    q_len: Annotated[int | None, typer.Option(help="Queries. A block mask knows its own.")] = None,
    kv_len: Annotated[int | None, typer.Option(help="Keys. By default as many as queries.")] = None,
    b: Batch = 0,
    h: Head = 0,
    score: Score = 0.0,
    block_size: Annotated[int, typer.Option(help="Tokens of a block, along each side.")] = 128,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="mask.png|mask.svg", help="A picture.")
    ] = None,
) -> None:
    """Draw which keys a mask lets each query see, or what a score_mod makes of a score.

    A function with five parameters is a score_mod, one with four a mask_mod.
    """
    console = Console(highlight=False)
    with contextlib.redirect_stdout(sys.stderr):  # the user's code runs here
        drawing = draw(
            show.load(place),
            q_len,
            kv_len,
            b=b,
            h=h,
            score=score,
            block_size=block_size,
            path=output,
            width=console.width,
        )
        text = Text(str(drawing) if output is None else f"wrote {output}")
    text.highlight_regex("[█▓▒░]+", "green")
    text.highlight_regex("·", "bright_black")
    console.print(text, soft_wrap=True)


@app.command("why")
def explain_mod(
    place: Place,
    q: Annotated[int, typer.Option("--q", min=0, help="The position of the query.")],
    kv: Annotated[int, typer.Option("--kv", min=0, help="The position of the key.")],
    b: Batch = 0,
    h: Head = 0,
    score: Score = 0.0,
) -> None:
    """Print what a mod computes at one position, below each of its lines."""
    with contextlib.redirect_stdout(sys.stderr):  # the user's code runs here
        found = why(show.load(place), b, h, q_idx=q, kv_idx=kv, score=score)
    Console(highlight=False).print(coloured(str(found), "python"), soft_wrap=True)


@app.command("walk")
def walk_call(
    place: Annotated[
        str,
        typer.Argument(metavar="FILE.py:NAME|MODULE:NAME", help="A function without parameters."),
    ],
) -> None:
    """Print which files of quire a call enters, in order."""
    with contextlib.redirect_stdout(sys.stderr):  # the user's code runs here
        found = walk.report(show.load(place))
    typer.echo(found)


@cache.command()
def info() -> None:
    """Print where compiled kernels are kept, and how much space they take."""
    kept = object_cache()
    usage, reason = kept.usage(), kept.obstacle()
    _print_rows(
        [
            ("directory", str(kept.directory)),
            ("used", "yes" if reason is None else f"no: {reason}"),
            ("objects", f"{usage.files:,}"),
            ("size", f"{usage.size:,} bytes"),
            ("limit", f"{kept.limit:,} bytes"),
        ]
    )


@cache.command()
def clear() -> None:
    """Remove the compiled kernels, and nothing else. They are compiled again when needed."""
    kept = object_cache()
    removed = kept.clear()
    typer.echo(f"removed {removed:,} object{'s' * (removed != 1)} from {kept.directory}")


def _print_rows(rows: Iterable[tuple[str, str]]) -> None:
    table = Table.grid(padding=(0, 2))
    for what, finding in rows:
        table.add_row(Text(what, style="bold"), Text(finding, style=_finding_style(what, finding)))
    Console(highlight=False).print(table)


def _finding_style(what: str, finding: str) -> str:
    if not (what.startswith("backend") or what == "used"):
        return ""
    return "green" if finding == "yes" else "yellow"


if __name__ == "__main__":
    main()
