"""The engine beside other engines: tokens a second, and what it costs beside the model.

    python benchmarks/engine.py --only transformers_58m

16 requests have prompts of 16 to 512 tokens and ask for 16 to 128; all arrive at once, and greedy
answers are counted until the last is there. All engines get the same requests in turns, and the
best turn of each counts. Environments of other engines are named by variables: see `_engines.py`.
Models for them are written to the directory QUIRE_PEER_MODELS, if it is set, and stay there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from _engines import NAMES, Peer, Work, peers
from _limits import reading
from _race import Table, run_parts

from quire.engine import Engine
from quire.engine.speculation import PromptLookup
from quire.integrations import smollm2
from quire.linear import PackedLinear, pack
from quire.runtime.program import Program

TURNS = 2
REQUESTS = 16
LENGTHS = [
    (round(16 * 32 ** (i / 15)), round(16 * 8 ** ((7 * i % 16) / 15))) for i in range(REQUESTS)
]
WANTED = {
    "transformers' continuous batching": ">= 2.5",
    "generate with PagedCache": ">= 1.3",
    NAMES["vllm"]: ">= 1.2",
    NAMES["llama"]: ">= 1.2",
    NAMES["openvino"]: ">= 0.9",
}
SUMMARY = (
    "The library keeps the keys and values of many sequences in pages. A page holds the keys and "
    "values of sixteen tokens. Sequences that begin with the same tokens share the pages of these "
    "tokens. When a sequence writes to a page that it shares, the page is copied first. When pages "
    "run out, the sequence that came last gives its pages back, and is computed again later."
)

Serve = Callable[[Work], Any]


def work() -> Work:
    """Return the requests: prompts of random tokens, and how many tokens to make of each."""
    draw = random.Random(0)
    return [([draw.randrange(5, 30_000) for _ in range(n)], new) for n, new in LENGTHS]


def random_model() -> Any:
    """Return a Llama of 58 million random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def smollm2_model() -> Any:
    """Return SmolLM2 in float32, without the file that it came from."""
    from transformers import LlamaConfig, LlamaForCausalLM

    found, _ = smollm2.load(attention="sdpa")
    options = found.config.to_dict()
    options.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**options)).eval()
    model.load_state_dict(found.state_dict())
    return model


# --- engines


def by_engine(model: Any) -> Serve:
    """The engine; its thread computes steps."""
    engine = Engine(model, n_pages=1000, prefix=False)

    def serve(requests: Work) -> None:
        asked = [engine.submit(prompt, max_tokens=n, ignore_eos=True) for prompt, n in requests]
        for request in asked:
            request.result()

    return serve


def by_continuous_batching(model: Any) -> Serve:
    """transformers' own continuous batching, with PyTorch's attention."""
    from transformers import GenerationConfig

    longest = max(new for _, new in LENGTHS)
    config = GenerationConfig(
        max_new_tokens=longest, do_sample=False, eos_token_id=-1, pad_token_id=0
    )

    def serve(requests: Work) -> None:
        manager = model.init_continuous_batching(generation_config=config)
        manager.start()
        try:
            for prompt, new in requests:
                manager.add_request(prompt, max_new_tokens=new)
            done = 0
            while done < len(requests):
                result = manager.get_result(timeout=1)
                done += result is not None and result.is_finished()
        finally:
            manager.stop(block=True)

    return serve


def by_generate(model: Any) -> Serve:
    """`generate` for one padded batch, whose keys and values are in pages."""
    from quire.integrations.transformers import PagedCache

    def serve(requests: Work) -> None:
        longest, new = (max(each) for each in zip(*LENGTHS, strict=True))
        ids = torch.zeros(len(requests), longest, dtype=torch.long)
        real = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(requests):
            ids[row, -len(prompt) :], real[row, -len(prompt) :] = torch.tensor(prompt), 1
        model.generate(
            ids,
            attention_mask=real,
            past_key_values=PagedCache(model.config),
            max_new_tokens=new,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )

    return serve


def _race(serving: dict[str, Serve], others: Sequence[Peer]) -> dict[str, float]:
    """Return the seconds that each engine takes for all requests, in its best turn."""
    requests = work()
    best: dict[str, float] = {}
    for turn in range(-1, TURNS):
        asked = requests[:2] if turn < 0 else requests  # the first turn compiles and loads
        taken = {}
        for name, serve in serving.items():
            start = time.perf_counter()
            serve(asked)
            taken[name] = time.perf_counter() - start
        for other in others:
            taken[NAMES[other.name]], _ = other.serve(asked)
        if turn >= 0:
            best = {name: min(best.get(name, seconds), seconds) for name, seconds in taken.items()}
    return best


def _add(table: Table, model: str, threads: int, best: dict[str, float]) -> None:
    ours, total = best.pop("ours"), sum(new for _, new in LENGTHS)
    for name, seconds in best.items():
        rates = {"ours_tokens_s": round(total / ours, 1), "theirs": round(total / seconds, 1)}
        case = f"{model}, {threads} threads, against {name}"
        table.add(case, seconds / ours, "x as fast", WANTED[name], **rates)


def _beside_transformers(table: Table, name: str, make: Callable[[], Any], threads: int) -> None:
    plain, paged = make(), make()
    plain.set_attn_implementation("sdpa")
    paged.set_attn_implementation("quire")
    serving = {
        "ours": by_engine(pack(make())),
        "transformers' continuous batching": by_continuous_batching(plain),
        "generate with PagedCache": by_generate(paged),
    }
    _add(table, name, threads, _race(serving, []))


def _beside_others(table: Table, name: str, make: Callable[[], Any], threads: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(os.environ.get("QUIRE_PEER_MODELS", directory)) / name
        if not path.exists():
            make().save_pretrained(path)
        others = peers(path, threads)
        _add(table, name, threads, _race({"ours": by_engine(pack(make()))}, others))
        for other in others:
            other.close()


def transformers_58m(table: Table, seconds: float, threads: int) -> None:
    """A random Llama with 58 million weights in float32, beside transformers."""
    _beside_transformers(table, "58m", random_model, threads)


def engines_58m(table: Table, seconds: float, threads: int) -> None:
    """The same beside other engines."""
    _beside_others(table, "58m", random_model, threads)


def transformers_smollm2(table: Table, seconds: float, threads: int) -> None:
    """SmolLM2-135M in float32, beside transformers."""
    if not _absent("SmolLM2"):
        _beside_transformers(table, "smollm2", smollm2_model, threads)


def engines_smollm2(table: Table, seconds: float, threads: int) -> None:
    """The same beside other engines."""
    if not _absent("SmolLM2"):
        _beside_others(table, "smollm2", smollm2_model, threads)


# --- the engine alone


@functools.cache
def served(weights: str, threads: int) -> Engine:
    """An engine with SmolLM2, whose steps are computed by hand."""
    return Engine.from_pretrained(
        "SmolLM2-135M-Instruct", weights=weights, max_bytes=1 << 30, start=False
    )


def _absent(case: str) -> bool:
    if missing := smollm2.missing():
        print(f"  {case}: needs {' and '.join(missing)}: {smollm2.HOW_TO_INSTALL}")
    return bool(missing)


def one_request(table: Table, seconds: float, threads: int) -> None:
    """One request, int8 weights: how much of a step would be spent if it only read the weights."""
    if _absent("one request"):
        return
    engine = served("int8", threads)
    model = engine._core.runner.model
    size = sum(
        {id(m): m.packed.nbytes for m in model.modules() if isinstance(m, PackedLinear)}.values()
    )
    copy = torch.ones(size // 4)
    read = reading(copy)
    engine.generate([work()[0][0]], max_tokens=4)
    steps, reads = [], []
    for _ in range(TURNS):
        request = engine.submit(work()[0][0], max_tokens=64, ignore_eos=True)
        next(iter(request))
        for _ in range(60):
            start = time.perf_counter()
            engine.step()
            steps.append(time.perf_counter() - start)
        request.result()
        for _ in range(20):
            start = time.perf_counter()
            read()
            reads.append(time.perf_counter() - start)
    share = 100 * min(reads) / min(steps)
    table.add(
        f"one request, int8, {threads} threads",
        share,
        "% of a step reads weights",
        ">= 60",
        step_ms=round(1e3 * min(steps), 2),
        tokens_s=round(1 / min(steps), 1),
        weights_mb=round(size / 1e6, 1),
    )


def overhead(table: Table, seconds: float, threads: int) -> None:
    """The time of a step outside of its kernels, with 16 requests that answer."""
    if _absent("overhead"):
        return
    engine = served("int8", threads)
    counts = engine._core.counts
    requests = [engine.submit(prompt[:40], max_tokens=64, ignore_eos=True) for prompt, _ in work()]
    for _ in range(10):
        engine.step()
    beside, whole = [], []
    with _timed_kernels() as kernels:
        for _ in range(40):
            total, inside = counts.seconds, kernels[0]
            engine.step()
            whole.append(counts.seconds - total)
            beside.append(whole[-1] - (kernels[0] - inside))
    for request in requests:
        request.result()
    assert kernels[0], "steps must run as a program"
    table.add(
        f"overhead of a step, {REQUESTS} requests, {threads} threads",
        1e3 * min(beside),
        "ms",
        "<= 1.5",
        median=round(1e3 * sorted(beside)[20], 2),
        step_ms=round(1e3 * min(whole), 1),
    )


@contextlib.contextmanager
def _timed_kernels() -> Iterator[list[float]]:
    """Count the seconds in which kernels of a step's program run. All else is Python."""
    run, seconds = Program.run, [0.0]

    def timed(program: Program, threads: int) -> None:
        start = time.perf_counter()
        run(program, threads)
        seconds[0] += time.perf_counter() - start

    Program.run = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Program.run = run  # type: ignore[method-assign]


def again(table: Table, seconds: float, threads: int) -> None:
    """The time to the first token of a prompt of 512 tokens, and of the same prompt again."""
    if _absent("the same prompt again"):
        return
    engine, draw = served("int8", threads), random.Random(1)
    first, second = [], []
    for _ in range(TURNS):
        prompt = [draw.randrange(5, 30_000) for _ in range(512)]
        for times in (first, second):
            start = time.perf_counter()
            next(iter(engine.submit(prompt, max_tokens=2, ignore_eos=True)))
            times.append(time.perf_counter() - start)
            while engine.step():
                pass
    table.add(
        f"the same prompt of 512 tokens again, {threads} threads",
        min(first) / min(second),
        "x sooner",
        ">= 5",
        first_ms=round(1e3 * min(first), 1),
        again_ms=round(1e3 * min(second), 1),
    )


def lookup(table: Table, seconds: float, threads: int) -> None:
    """A summary, and a text that is repeated, with and without guesses from the prompt."""
    if _absent("prompt lookup"):
        return
    engine = served("int8", threads)
    for case, task, wanted in (
        ("a summary", "Summarise this text in two sentences", ">= 1.3"),
        ("a text repeated", "Repeat this text word for word", ""),
    ):
        chat = [{"role": "user", "content": f"{task}:\n\n{SUMMARY}"}]
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(2 * TURNS):
            texts = []
            for guesses, taken in times.items():
                start = time.perf_counter()
                drafter = PromptLookup() if guesses else None
                request = engine.submit(chat, max_tokens=96, drafter=drafter)
                texts.append(request.result().tokens)
                taken.append(time.perf_counter() - start)
            assert texts[0] == texts[1], "guesses must not change the answer"
        table.add(
            f"guesses from the prompt, {case}, {threads} threads",
            min(times[False]) / min(times[True]),
            "x as fast",
            wanted,
            tokens=len(texts[0]),
        )


if __name__ == "__main__":
    beside = (transformers_58m, engines_58m, transformers_smollm2, engines_smollm2)
    parts = (*beside, one_request, overhead, again, lookup)
    run_parts("engine", __doc__, parts, with_one_thread=parts)
