"""The command line.

    quire demo      what quire does, in under a minute
    quire doctor    what this machine has to offer

A command is a function below. Only the entry point imports this module, so rich and typer stay
optional for everyone else.
"""

from __future__ import annotations

import sys
from typing import Annotated

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text
except ModuleNotFoundError as missing:
    sys.exit(
        f"quire: the command line needs rich and typer, but it found this: {missing}. "
        f"Install both with: pip install 'quire[cli]'"
    )

from quire import __version__, demo
from quire.doctor import report
from quire.errors import QuireError

app = typer.Typer(
    help="Attention that you program in plain Python, on any CPU.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The entry point of the `quire` command."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        app()
    except QuireError as error:
        sys.exit(f"quire: {error}")


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
    threads: Annotated[int, typer.Option(min=1, help="Threads of either side.")] = 1,
) -> None:
    """A mod in three lines: drawn, checked and measured beside PyTorch, in under a minute."""
    if not demo.run(Console(highlight=False), tokens, seconds, threads):
        raise typer.Exit(1)


@app.command()
def doctor() -> None:
    """What this machine has to offer: versions, CPU, threads, cache, backends."""
    table = Table.grid(padding=(0, 2))
    for what, finding in report():
        table.add_row(Text(what, style="bold"), Text(finding, style=_finding_style(what, finding)))
    Console(highlight=False).print(table)


def _finding_style(what: str, finding: str) -> str:
    if not what.startswith("backend"):
        return ""
    return "green" if finding == "yes" else "yellow"


if __name__ == "__main__":
    main()
