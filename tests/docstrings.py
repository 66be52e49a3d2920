"""Programs in docstrings, and what they take as known."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

from builder.symbols import public_modules, symbols

COMMON = """
import math, torch
from torch import nn
import quire, quire.distributed, quire.linear
from quire import *
from quire.kv import *
from quire.ir.trace import trace
from quire.mods import *
{more}
"""

TINY = """
from serving import save_model
from transformers import AutoModelForCausalLM, AutoTokenizer
from quire.engine import Engine, loading
save_model(folder / "tiny")
model = AutoModelForCausalLM.from_pretrained(folder / "tiny", attn_implementation="quire").eval()
tokenizer = AutoTokenizer.from_pretrained(folder / "tiny")
prompt = "Once"
"""


def programs() -> Iterator[tuple[str, str]]:
    """The indented programs of public docstrings that call something."""
    seen = set()
    texts = [(name, symbol.doc) for name, symbol in symbols().items()]
    texts += [(name, module.__doc__ or "") for name, module in public_modules().items()]
    for name, doc in texts:
        for text in programs_of(doc):
            if text not in seen:
                seen.add(text)
                yield name, text


def programs_of(doc: str) -> Iterator[str]:
    """The indented programs of a docstring."""
    indented = re.compile(r"(?:^ {4,}.*\n|^\s*\n)+", re.MULTILINE)
    for block in indented.findall(inspect.cleandoc(doc) + "\n"):
        text = inspect.cleandoc(block)
        if text and ">>>" not in text and is_program(text):
            yield text


def is_program(text: str) -> bool:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return any(isinstance(node, ast.Call) for node in ast.walk(tree))


PROGRAMS = list(programs())
"""Names and programs of public docstrings."""
