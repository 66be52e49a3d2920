"""The options of `quire serve`, which processes on other machines read as well."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import ArgumentError
from quire.mods import MaskMod, ScoreMod

if TYPE_CHECKING:
    from quire.engine import Engine
    from quire.serve.settings import Settings

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command. `mask` and `score_mod` may be FILE.py:NAME.

    Without `replicas` there is one process. `threads` are those of a process.
    """

    model: str = "SmolLM2-135M-Instruct"
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    weights: str = "float32"
    max_bytes: int = 1 << 30
    mask: MaskMod | str | None = None
    score_mod: ScoreMod | str | None = None
    api_keys: Sequence[str] = ()
    api_keys_file: str | None = None
    allowed_hosts: Sequence[str] = ()
    lookup: bool = False
    max_ongoing: int = 256
    time_limit: float = 600.0
    read_limit: float = 30.0
    replicas: int = 0
    threads: int | None = None

    def settings(self) -> Settings:
        """Return the settings of the server."""
        from quire.serve.settings import LOOPBACK, Settings

        local = is_loopback(self.host)
        hosts = (*LOOPBACK, self.host, *self.allowed_hosts)
        return Settings(
            model=self.name or Path(self.model).name,
            api_keys=self.keys(),
            hosts=hosts if local or self.allowed_hosts else None,
            lookup=self.lookup,
            max_ongoing=self.max_ongoing,
            time_limit=self.time_limit,
            read_limit=self.read_limit,
        )

    def keys(self) -> tuple[str, ...]:
        """Return all keys."""
        file = None if self.api_keys_file is None else Path(self.api_keys_file)
        return read_keys(self.api_keys, file)

    def engine(self) -> Engine:
        """Load the model, and return its engine."""
        from quire.engine import Engine
        from quire.tools import show

        return Engine.from_pretrained(
            self.model,
            weights=self.weights,  # type: ignore[arg-type]  # it checks the name
            max_bytes=self.max_bytes,
            mask=show.load(self.mask) if isinstance(self.mask, str) else self.mask,
            score_mod=show.load(self.score_mod)
            if isinstance(self.score_mod, str)
            else self.score_mod,
        )

    def plain(self) -> dict[str, Any]:
        """Return the fields, for a process that has no such class yet."""
        return dataclasses.asdict(self)


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


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
