"""The examples of public names: docs/examples/MODULE.py, one cell for each name.

    # %% quire.attention
    import torch
    ...

A cell is a whole program: it imports what it uses. Tests run each; pages show it.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "examples"
CELL = re.compile(r"^# %% ([\w.]+)\n(.*?)(?=^# %% |\Z)", re.MULTILINE | re.DOTALL)


@functools.cache
def examples() -> dict[str, str]:
    """Return the programs by the public name that they are for."""
    found: dict[str, str] = {}
    for path in sorted(FOLDER.glob("*.py")):
        for name, program in CELL.findall(path.read_text()):
            assert name not in found, f"{path.name} has a second example of {name}"
            found[name] = program.strip() + "\n"
    return found
