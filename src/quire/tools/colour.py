"""Colours for Python and for the stages of a kernel.

    Console().print(coloured(quire.kernel(mask_mod=quire.mods.causal).stages["asm"], "asm"))

Text goes in, and the same text with styles comes out. The console leaves styles out if there is no
terminal, or if NO_COLOR is set.
"""

from __future__ import annotations

import re

from rich.syntax import Syntax
from rich.text import Text

_STYLES = {
    "directive": "dim",
    "label": "bright_green",
    "name": "",
    "number": "yellow",
    "string": "yellow",
    "type": "bright_cyan",
    "word": "bright_blue",
}

# The first alternative that matches wins, so types inside names are not coloured.
_GRAPH = r"""
    (?P<label>  ^\w+:$                                        ) # mask:
  | (?P<name>   %\d+                                          ) # %2
  | (?P<number> (?<=\ const\ ).+(?=\ :\ )                     ) # const 20.0
  | (?P<word>   (?<=\ =\ )\w+                                 ) # = add
  | (?P<type>   (?<=\ :\ )\w+                                 ) # : float32
"""
_LLVM = r"""
    (?P<label>  ^[\w.]+:$ | @[\w.]+                           ) # entry:, @full
  | (?P<name>   %[\w.]+                                       ) # %v1
  | (?P<type>   <\d+\ x\ \w+> | \b(?:i\d+|float|double|ptr|void)\b )
  | (?P<number> -?\b\d\w*(?:\.\d+)?                           ) # 1, 0x3FF0000000000000
  | (?P<word>   [a-z]\w*                                      ) # add, nounwind
"""
_ASM = r"""
    (?P<label>  ^[\w.]+:$ | \.L\w+                            ) # full:, .LBB0_2
  | (?P<directive> (?<=^\t)\.\w+                              ) # .p2align
  | (?P<word>   (?<=^\t)[a-z][\w.]*                           ) # vaddps, b.lt
  | (?P<string> "[^"]*"                                       )
  | (?P<number> [$#]?-?\b(?:0x[\da-f]+|\d+)\b                 ) # 64, $64, #64
  | (?P<name>   [%@]?[a-z][\w.]*                              ) # %ymm0, v0.4s
"""
_TOKENS = {
    language: re.compile(pattern, re.VERBOSE | re.MULTILINE)
    for language, pattern in {"graph": _GRAPH, "llvm": _LLVM, "asm": _ASM}.items()
}


def coloured(text: str, language: str) -> Text:
    """Return `text` in the colours of its language: python, graph, llvm or asm."""
    if language == "python":
        shown = Syntax("", "python", theme="ansi_dark").highlight(text)
        shown.rstrip()
        return shown
    shown = Text(text.rstrip())
    for token in _TOKENS[language].finditer(text):
        assert token.lastgroup is not None, "every alternative has a name"
        shown.stylize(_STYLES[token.lastgroup], *token.span())
    return shown
