"""Drawing: what all drawings have in common. Each is text, and a picture."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ArgumentError, MissingPackageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Drawing:
    """A drawing: `print` shows it as text, and `save` writes it as a picture.

    Pictures need matplotlib, which is imported when the first one is made. Text does not.
    """

    def __str__(self) -> str:
        raise NotImplementedError

    def __repr__(self) -> str:
        return str(self)

    def svg(self) -> str:
        """Return the picture as SVG."""
        return self._picture("svg").decode()

    def png(self) -> bytes:
        """Return the picture as PNG."""
        return self._picture("png")

    def _repr_png_(self) -> bytes | None:
        """Return the picture for a notebook. None without matplotlib: a notebook shows the text."""
        try:
            return self.png()
        except MissingPackageError:
            return None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to a file whose name ends in .png or .svg."""
        kind = (file := Path(path)).suffix.lower().removeprefix(".")
        if kind not in ("png", "svg"):
            raise ArgumentError(
                f"path must end in .png or .svg, but is {os.fspath(path)!r}. Name the file "
                f"{file.stem}.png or {file.stem}.svg."
            )
        file.write_bytes(self._picture(kind))

    def _picture(self, kind: str) -> bytes:
        from quire.draw.picture import rendered

        return rendered(self._figure, kind)

    def _figure(self) -> Figure:
        raise NotImplementedError
