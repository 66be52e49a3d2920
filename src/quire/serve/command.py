"""What `quire serve` does: load a model, make an engine, open a socket, serve."""

from __future__ import annotations

import importlib.util
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ArgumentError, MissingPackageError
from quire.mods import MaskMod, ScoreMod

if TYPE_CHECKING:
    from quire.serve.settings import Settings

NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance", "jinja2")
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command."""

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    weights: str = "float32"
    max_bytes: int = 1 << 30
    mask: MaskMod | None = None
    score_mod: ScoreMod | None = None
    api_keys: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    lookup: bool = False
    max_ongoing: int = 256
    time_limit: float = 600.0
    read_limit: float = 30.0

    def settings(self, model: str) -> Settings:
        """Return the settings of the server."""
        from quire.serve.settings import LOOPBACK, Settings

        local = _is_loopback(self.host)
        hosts = (*LOOPBACK, self.host, *self.allowed_hosts)
        if not local and not self.api_keys:
            print("quire: all who can reach this address may ask. Give --api-key to change that.")
        return Settings(
            model=self.name or Path(model).name,
            api_keys=self.api_keys,
            hosts=hosts if local or self.allowed_hosts else None,
            lookup=self.lookup,
            max_ongoing=self.max_ongoing,
            time_limit=self.time_limit,
            read_limit=self.read_limit,
        )


def serve(model: str, options: Options) -> None:
    """Serve a model until a signal comes."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingPackageError(
            f"{', '.join(absent)} must be installed for serve, but cannot be found. Install: "
            f"pip install 'quire[serve]'."
        )
    from quire.engine import Engine
    from quire.serve import process

    bound = process.listen(options.host, options.port)  # before the model: a port may be taken
    settings = options.settings(model)
    engine = Engine.from_pretrained(
        model,
        weights=options.weights,  # type: ignore[arg-type]  # it checks the name
        max_bytes=options.max_bytes,
        mask=options.mask,
        score_mod=options.score_mod,
    )
    host, port = bound.getsockname()[:2]
    at = f"[{host}]" if ":" in host else host
    print(
        f"{settings.model} at http://{at}:{port} (OpenAI's interface: /v1). Ctrl-C ends.",
        flush=True,
    )
    process.run(engine, settings, bound)


def read_keys(given: Sequence[str], file: Path | None) -> tuple[str, ...]:
    """Return the keys of the command line and of a file, which has one in each line."""
    keys = list(given)
    if file is not None:
        try:
            keys += [line.strip() for line in file.read_text().splitlines() if line.strip()]
        except OSError as error:
            raise ArgumentError(
                f"--api-keys must be a file that can be read, but: {error.strerror}. Check it."
            ) from None
    if any(not key.isascii() or not key.isprintable() or not key or " " in key for key in keys):
        raise ArgumentError(
            "an API key must be letters, digits and signs without spaces, but one is not. Choose "
            "another one."
        )
    return tuple(dict.fromkeys(keys))


def num_bytes(text: str) -> int:
    """Return the number of bytes of a text such as 512MB or 2GB.

    >>> num_bytes("2GB") == 2 << 30
    True
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?", text.strip().upper())
    if found is None:
        raise ArgumentError(
            f"--max-bytes must be a size such as 512MB or 2GB, but is {text!r}. Give a number and "
            f"a unit."
        )
    return int(float(found[1]) * UNITS[found[2]])


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
