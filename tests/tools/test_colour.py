"""Colours: nothing of the text changes, and each word has the colour of what it is."""

from __future__ import annotations

from itertools import pairwise

import pytest
from rich.text import Text

import quire
from quire.tools.colour import coloured

MODS = {"score_mod": quire.mods.softcap(20.0), "mask_mod": quire.mods.document(lengths=[5, 3])}


def words(text: Text, style: str) -> list[str]:
    """What has that style, in the order of the text."""
    return [text.plain[span.start : span.end] for span in text.spans if span.style == style]


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
@pytest.mark.parametrize("stage", ["graph", "llvm", "asm"])
def test_the_text_stays_and_nothing_is_coloured_twice(stage: str, target: str) -> None:
    text = quire.kernel(**MODS, target=target).stages[stage]
    shown = coloured(text, stage)
    assert shown.plain == text.rstrip()
    assert all(first.end <= second.start for first, second in pairwise(shown.spans))


def test_python() -> None:
    shown = coloured("def near(b):\n    return b < 3\n", "python")
    assert shown.plain == "def near(b):\n    return b < 3"
    assert len({str(span.style) for span in shown.spans}) > 2


def test_a_graph() -> None:
    def near(score, b, h, q_idx, kv_idx):
        return score * 20.0 - q_idx

    shown = coloured(quire.kernel(near).stages["graph"], "graph")
    assert words(shown, "bright_green") == ["score:"]
    assert words(shown, "bright_blue") == ["input", "const", "mul", "input", "cast", "sub"]
    assert words(shown, "yellow") == ["20.0"]
    assert words(shown, "bright_cyan") == [*["float32"] * 3, "int32", *["float32"] * 2]


def test_llvm() -> None:
    shown = coloured(
        "define void @full(ptr %i64) nounwind {\n"
        "entry:\n"
        "  %v1 = fadd <8 x float> %ptr, splat (float 0x3FF0000000000000)\n"
        "  %v2 = add i64 %v1, -16\n",
        "llvm",
    )
    assert words(shown, "bright_green") == ["@full", "entry:"]
    assert words(shown, "bright_blue") == ["define", "nounwind", "fadd", "splat", "add"]
    assert words(shown, "bright_cyan") == ["void", "ptr", "<8 x float>", "float", "i64"]
    assert words(shown, "yellow") == ["0x3FF0000000000000", "-16"]


@pytest.mark.parametrize(
    ("line", "mnemonic", "numbers", "label"),
    [
        ("\tvmovaps\t-32(%rdi,%r9,4), %ymm4", "vmovaps", ["-32", "4"], []),
        ("\tvbroadcastss\t.LCPI0_1(%rip), %ymm7", "vbroadcastss", [], [".LCPI0_1"]),
        ("\taddq\t$64, %rdi", "addq", ["$64"], []),
        ("\tldp\tq23, q24, [x12, #-32]", "ldp", ["#-32"], []),
        ("\tb.lt\t.LBB0_1", "b.lt", [], [".LBB0_1"]),
        ("\tadd\tv19.4s, v19.4s, v0.4s", "add", [], []),
    ],
)
def test_an_instruction(line: str, mnemonic: str, numbers: list[str], label: list[str]) -> None:
    shown = coloured(line, "asm")
    assert words(shown, "bright_blue") == [mnemonic]
    assert words(shown, "yellow") == numbers
    assert words(shown, "bright_green") == label


def test_what_is_not_an_instruction_in_assembly() -> None:
    shown = coloured('full:\n\t.file\t"<string>"\n\t.long\t0xff800000\n', "asm")
    assert words(shown, "bright_green") == ["full:"]
    assert words(shown, "dim") == [".file", ".long"]
    assert words(shown, "yellow") == ['"<string>"', "0xff800000"]
    assert not words(shown, "bright_blue")
