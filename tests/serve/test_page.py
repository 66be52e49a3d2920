"""The page in a real browser: a question is typed, tokens arrive, the map of pages changes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import httpx2 as httpx
import pytest
from browser import Tab, browser, executable
from serving import KEYS, Served, served

pytestmark = pytest.mark.skipif(executable() is None, reason="Chromium is not installed")

SUMMARY = "document.getElementById('summary').textContent"
IDLE = "document.getElementById('stop').disabled"


@pytest.fixture(scope="module")
def tab() -> Iterator[Tab]:
    with browser() as opened:
        yield opened


def ready(tab: Tab, server: Served) -> None:
    tab.size(1200, 800)
    tab.open(server.url)
    tab.wait("document.getElementById('model')?.textContent === 'tiny'")
    tab.wait(f"{SUMMARY}.includes('tokens each')")
    tab.problems.clear()


def asked(server: Served) -> AbstractContextManager[httpx.Response]:
    """Ask for an answer that takes seconds, as a stream that ends when it is left."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    return httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)


def test_a_question_is_typed_and_answered(tab: Tab, server: Served) -> None:
    ready(tab, server)
    tab.evaluate("document.getElementById('question').focus()")
    tab.type("the quick brown fox jumps over the lazy dog, and then?")
    tab.press("Enter", 13, "\r")
    tab.wait("document.querySelector('.user span').textContent.startsWith('the quick')")
    # Text is there while the answer is still written: tokens arrive one by one.
    shown = tab.wait(
        "document.querySelector('.assistant span')?.textContent.length > 1 || "
        "document.querySelector('.assistant small')?.textContent"
    )
    assert shown
    tab.wait("document.querySelector('.assistant small').textContent.includes('tokens in')")
    tab.wait(IDLE)
    kept = tab.wait(
        "document.getElementById('summary').textContent.match(/, ([1-9]\\d*) kept/)?.[1]"
    )
    assert int(kept) >= 1
    assert tab.evaluate("document.getElementById('question').value") == ""
    assert tab.problems == []


def test_several_questions_share_their_prefix(tab: Tab, server: Served) -> None:
    ready(tab, server)
    tab.evaluate(
        f"""
        window.most = {{shared: 0, rows: 0}};
        new MutationObserver(() => {{
            const shared = Number({SUMMARY}.match(/(\\d+) shared/)?.[1]);
            const rows = document.querySelectorAll('tbody tr').length;
            window.most.shared = Math.max(window.most.shared, shared || 0);
            window.most.rows = Math.max(window.most.rows, rows);
        }}).observe(document.body, {{subtree: true, childList: true, characterData: true}});
        document.getElementById('several').click();
        """
    )
    tab.wait(
        "document.querySelectorAll('.group small').length === 4 && "
        "[...document.querySelectorAll('.group small')].every(each => each.textContent)"
    )
    tab.wait(IDLE)
    # Answers of a small random model may be over between two frames, so ask once more if need be.
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if tab.evaluate("window.most.shared > 0 && window.most.rows > 1"):
            break
        tab.evaluate("document.getElementById('several').click()")
        tab.wait(IDLE)
    assert tab.evaluate("window.most.shared > 0 && window.most.rows > 1")
    assert tab.problems == []


def test_the_keyboard_reaches_a_row_and_stays_there(tab: Tab, server: Served) -> None:
    ready(tab, server)
    with ExitStack() as stack:
        first, second = (stack.enter_context(asked(server)) for _ in range(2))
        tab.wait("document.querySelectorAll('tbody tr').length === 2")
        tab.evaluate("document.getElementById('clear').focus()")
        tab.press("Tab", 9)
        tab.press("Tab", 9)
        number = tab.evaluate("document.activeElement.dataset.number")
        assert number and tab.evaluate("document.activeElement.rowIndex") == 2
        first.close()
        tab.wait("document.querySelectorAll('tbody tr').length === 1")
        written = "Number(document.querySelector('tbody tr').cells[4].textContent)"
        so_far = tab.evaluate(written)
        tab.wait(f"{written} > {so_far}")
        assert tab.evaluate("document.activeElement.dataset.number") == number
        assert second.status_code == 200
    tab.wait("document.querySelectorAll('tbody tr').length === 0")
    assert tab.problems == []


# Keeps the bodies of chats that the page sends, and holds them back until `release` is called.
HOLD = """
    window.sent = [];
    window.plain ??= window.fetch;
    const held = new Promise((release) => { window.release = release; });
    window.fetch = async (url, options) => {
        if (options?.body) {
            window.sent.push(JSON.parse(options.body));
            await held;
        }
        return window.plain(url, options);
    };
"""


def ask(tab: Tab, question: str) -> None:
    tab.evaluate("document.getElementById('question').focus()")
    tab.type(question)
    tab.press("Enter", 13, "\r")


def contents(tab: Tab, number: int) -> list[str]:
    """Return what the messages of a chat say after the first, which is the page's."""
    tab.wait(f"window.sent.length > {number}")
    sent = tab.evaluate(f"window.sent[{number}].messages")
    roles = [each["role"] for each in sent]
    assert roles == ["system", "user", *["assistant", "user"] * (len(sent) // 2 - 1)]
    return [each["content"] for each in sent[1:]]


def test_a_question_beside_another(tab: Tab, server: Served) -> None:
    """It is sent at once, and knows the answers that are complete."""
    ready(tab, server)
    tab.evaluate(HOLD)
    ask(tab, "first")
    ask(tab, "second")
    assert contents(tab, 0) == ["first"] and contents(tab, 1) == ["second"]
    assert not tab.evaluate(IDLE)
    tab.evaluate("window.release()")
    tab.wait(IDLE)
    answers = tab.evaluate(
        "[...document.querySelectorAll('.assistant span')].map(each => each.textContent)"
    )
    assert any(answers) and tab.problems == []
    ask(tab, "third")
    turns = zip(("first", "second"), answers, strict=True)
    assert contents(tab, 2) == [*(each for turn in turns if turn[1] for each in turn), "third"]
    tab.wait(IDLE)


def test_an_answer_without_a_word_is_no_turn(tab: Tab, server: Served) -> None:
    ready(tab, server)
    tab.evaluate(HOLD)
    ask(tab, "first")
    tab.press("Escape", 27)
    tab.evaluate("window.release()")
    tab.wait("document.querySelector('.assistant small').textContent === 'stopped'")
    assert tab.evaluate("document.querySelector('.assistant span').textContent") == ""
    ask(tab, "second")
    assert contents(tab, 1) == ["second"]
    tab.wait(IDLE)


def test_escape_stops_and_a_new_chat_is_empty(tab: Tab, server: Served) -> None:
    ready(tab, server)
    tab.evaluate("document.getElementById('several').click()")
    tab.press("Escape", 27)
    tab.wait(IDLE)
    tab.evaluate("document.getElementById('clear').click()")
    assert tab.evaluate("document.querySelectorAll('#messages li').length") == 1


def test_the_server_goes_and_comes_back(tab: Tab, model: Path) -> None:
    """The page says so, and keeps the question."""
    with served(model) as running:
        ready(tab, running)
        tab.evaluate(HOLD)
        ask(tab, "first")
        assert contents(tab, 0) == ["first"]
        assert running.stop() == 0
    tab.wait("document.getElementById('model').textContent.startsWith('The server is gone')")
    assert tab.evaluate("document.getElementById('send').disabled")
    assert tab.evaluate(SUMMARY).startswith("The server is gone")
    tab.evaluate("window.release()")
    tab.wait("document.getElementById('question').value === 'first'")
    assert tab.evaluate("document.querySelector('.failed').textContent").startswith("The server is")
    tab.evaluate("document.getElementById('question').focus()")
    tab.press("Enter", 13, "\r")
    assert tab.evaluate("document.getElementById('question').value") == "first"
    with served(model, "--port", running.url.rpartition(":")[2]) as again:
        tab.wait("document.getElementById('model').textContent === 'tiny'")
        tab.wait(f"{SUMMARY}.includes('tokens each')")
        tab.press("Enter", 13, "\r")
        assert contents(tab, 1) == ["first"]
        tab.wait(IDLE)
        tab.open("about:blank")
        assert again.stop() == 0


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_telephone(tab: Tab, server: Served, dark: bool) -> None:
    ready(tab, server)
    tab.size(390, 844, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    rows = tab.evaluate("[...document.querySelectorAll('.row button')].map(each => each.offsetTop)")
    assert len(set(rows)) == 1 or Counter(rows).most_common()[-1][1] > 1, "a button stands alone"
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in background[4:-1].split(",")) / 3
    assert (brightness < 60) == dark
    # Everything that can be pressed is reached by the keyboard, in the order in which it stands.
    tab.evaluate("document.getElementById('question').focus()")
    reached = []
    for _ in range(2):
        tab.press("Tab", 9)
        reached.append(tab.evaluate("document.activeElement.id"))
    assert reached == ["send", "several"]


def test_a_page_asks_for_the_key(tab: Tab, guarded: Served) -> None:
    tab.size(1200, 800)
    tab.open(guarded.url)
    tab.wait("document.getElementById('key')?.hidden === false")
    # It asks again and again, and leaves the focus where it is.
    tab.evaluate("document.getElementById('question').focus()")
    asked = "performance.getEntriesByType('resource').filter(each => each.name.includes('/live'))"
    before = tab.evaluate(f"{asked}.length")
    tab.wait(f"{asked}.length >= {before} + 2")
    assert tab.evaluate("document.activeElement.id") == "question"
    tab.evaluate("document.getElementById('secret').focus()")
    tab.type(KEYS[0])
    tab.press("Enter", 13, "\r")
    tab.wait("document.getElementById('model').textContent === 'tiny'")
    tab.wait(f"{SUMMARY}.includes('tokens each')")
    assert tab.evaluate("document.getElementById('key').hidden")
    tab.open("about:blank")  # its stream of frames ends
