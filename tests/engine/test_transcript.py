"""Text of tokens while an answer grows: whole characters, and stop strings that span tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_level

from quire.engine.sampling import Sampler, Sampling, Vocabulary
from quire.engine.sampling.transcript import Transcript

TOKENIZER = byte_level()
SIZE = len(TOKENIZER)
VOCABULARY = Vocabulary(TOKENIZER, size=SIZE)


def first_stop(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


@given(
    pieces=st.lists(st.text("abc ", max_size=4), max_size=12),
    stops=st.lists(st.text("abc ", min_size=1, max_size=5), max_size=3),
)
def test_a_stop_string_is_found_wherever_tokens_meet(pieces: list[str], stops: list[str]) -> None:
    wanted = first_stop("".join(pieces), stops)
    mine, shown = Transcript(stops), ""
    for piece in pieces:
        if mine.stopped:
            break
        mine.add(piece.encode())
        assert mine.text.startswith(shown) and wanted.startswith(mine.text)
        shown = mine.text
    found = mine.stopped
    mine.close()
    assert mine.text.startswith(shown)
    # A token may hold more than one stop string: the first in the text counts.
    assert found == any(stop in "".join(pieces) for stop in stops)
    assert mine.text == wanted


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    mine = Transcript(["END", "\n\n"])
    for content, text in [("one E", "one "), ("N", "one "), ("O", "one ENO"), ("\n", "one ENO")]:
        mine.add(content.encode())
        assert mine.text == text and not mine.stopped
    copied = mine.fork()
    mine.add(b"\nrest")
    assert mine.text == "one ENO" and mine.stopped
    copied.add(b"x")
    copied.close()
    assert copied.text == "one ENO\nx" and not copied.stopped


@given(st.lists(st.integers(0, SIZE - 1), max_size=40))
def test_text_is_that_of_the_tokenizer(tokens: list[int]) -> None:
    """Also where bytes are no characters, and where a special token stands between bytes."""
    mine = Sampler(Sampling(max_tokens=1000, ignore_eos=True), [], VOCABULARY)
    shown = ""
    for token in tokens:
        mine.accept(token)
        assert mine.text.startswith(shown)
        shown = mine.text
    if tokens:
        mine._transcript.close()
    assert mine.text == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_characters_are_shown_when_they_are_whole() -> None:
    tokens = TOKENIZER("日本é")["input_ids"]
    mine = Sampler(Sampling(max_tokens=len(tokens)), [], VOCABULARY)
    seen = []
    for token in tokens:
        mine.accept(token)
        seen.append(mine.text)
    assert "\ufffd" not in "".join(seen) and seen[-1] == "日本é" and seen[0] in ("", "日")
    cut = Sampler(Sampling(max_tokens=1), [], VOCABULARY)
    cut.accept(VOCABULARY.encode("é")[0])
    assert cut.finished == "length" and cut.text == TOKENIZER.decode(cut.tokens)


def test_the_end_of_a_turn_has_no_text() -> None:
    mine = Sampler(Sampling(max_tokens=9, stop=["fox!"]), [], VOCABULARY)
    for token in VOCABULARY.encode("the fox"):
        mine.accept(token)
    assert mine.text == "the "
    mine.accept(TOKENIZER.eos_token_id)
    assert (mine.finished, mine.text) == ("stop", "the fox")
    assert VOCABULARY.spelling(TOKENIZER.eos_token_id) == b"<|end|>"


def test_a_stop_string_ends_an_answer() -> None:
    mine = Sampler(Sampling(max_tokens=90, stop="brown f"), [], VOCABULARY)
    for token in VOCABULARY.encode("the quick brown fox jumps"):
        if mine.finished is None:
            mine.accept(token)
    assert (mine.finished, mine.text) == ("stop", "the quick ")


def test_tokens_beyond_the_tokenizer_have_no_text() -> None:
    padded = Vocabulary(TOKENIZER, size=SIZE + 20)
    assert padded.text_bytes(SIZE + 3) == b""
