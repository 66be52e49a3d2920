"""A step as a program has the bits of a step by modules, and gives way where it must."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from quire.codegen.convention import KEYS_OF_PIECE
from quire.engine import Engine
from quire.engine.decoder import Decoder
from quire.linear import pack
from quire.runtime.program import LayerLaunches

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SIZES)),
    "mistral": (MistralForCausalLM, MistralConfig(**SIZES, sliding_window=None)),
}
LENGTHS = (3, 150, 1, 40)


def packed(kind: str, weights: Any = "float32") -> Any:
    torch.manual_seed(0)
    family, config = KINDS[kind]
    return pack(family(config).eval(), weights)


def answers(model: Any, *, program: bool, **options: Any) -> list[Any]:
    """The answers to a few prompts, and a check that a program did or did not compute them."""
    engine = Engine(model, n_pages=64, max_tokens=140, prefix=False, start=False)
    runner, results = engine._core.runner, []
    decoder = runner._decoder
    assert isinstance(decoder, Decoder)
    if not program:
        runner._decoder = None
    compute = decoder.compute

    def computed(*arguments: Any) -> Any:
        found = compute(*arguments)
        results.append(found is not None)
        return found

    decoder.compute = computed  # type: ignore[method-assign]
    draw = torch.Generator().manual_seed(1)
    requests = [
        engine.submit(
            torch.randint(0, 61, (length,), generator=draw).tolist(),
            max_tokens=6,
            ignore_eos=True,
            logprobs=2,
            **options,
        )
        for length in LENGTHS
    ]
    found = [(each.result().tokens, each.result().logprobs) for each in requests]
    assert (len(results) > 0 and all(results)) if program else not results
    engine.check_integrity()
    return found


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_program_has_the_bits_of_modules(kind: str) -> None:
    model = packed(kind)
    assert answers(model, program=True) == answers(model, program=False)


@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_weights_may_be_stored_otherwise(weights: str) -> None:
    model = packed("llama", weights)
    assert answers(model, program=True) == answers(model, program=False)


def test_the_number_of_threads_does_not_matter() -> None:
    model, before = packed("llama"), torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(answers(model, program=True))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1] == found[2]


def test_requests_may_have_mods() -> None:
    model, table = packed("llama"), torch.randn(4)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[h] * (q_idx - kv_idx)

    options = {"score_mod": score_mod, "mask": lambda b, h, q, k: q - k < 20}
    found = answers(model, program=True, **options)
    assert found == answers(model, program=False, **options)
    assert found != answers(model, program=True)


def test_launches_of_attention_are_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths grow past pages and past the keys of a piece, and sequences take others' places."""
    torch.manual_seed(0)
    config = LlamaConfig(**{**SIZES, "max_position_embeddings": 2048})
    model = pack(LlamaForCausalLM(config).eval())
    used: list[int] = []
    again = LayerLaunches.decode_again

    def counted(self: LayerLaunches, table: torch.Tensor, lengths: Any) -> None:
        used.append(int(lengths.max()))
        again(self, table, lengths)

    monkeypatch.setattr(LayerLaunches, "decode_again", counted)

    def serve(*, program: bool) -> list[Any]:
        engine = Engine(
            model, page_size=4, n_pages=600, max_requests=2, max_tokens=2000, start=False
        )
        if not program:
            engine._core.runner._decoder = None
        asked = [(1015, 16), (7, 5), (40, 9), (3, 20), (90, 15)]
        requests = [
            engine.submit([n % 61] * n, max_tokens=new, ignore_eos=True, logprobs=2)
            for n, new in asked
        ]
        return [(each.result().tokens, each.result().logprobs) for each in requests]

    found = serve(program=True)
    assert len(used) > 8 and max(used) == KEYS_OF_PIECE - 1
    used.clear()
    assert found == serve(program=False) and not used


def test_hooks_of_modules_are_called() -> None:
    model, seen = packed("llama"), []
    engine = Engine(model, n_pages=8, prefix=False, start=False)
    hook = model.model.layers[1].register_forward_hook(lambda *_: seen.append(1))
    first = engine.generate([[1, 2, 3]], max_tokens=2, ignore_eos=True)[0].tokens
    hook.remove()
    assert len(seen) == 2
    assert engine.generate([[1, 2, 3]], max_tokens=2, ignore_eos=True)[0].tokens == first
    assert len(seen) == 2


def scored(engine: Engine) -> list[float] | None:
    """The log-probabilities of an answer."""
    return engine.submit([1, 2, 3], max_tokens=3, ignore_eos=True, logprobs=0).result().logprobs


def of_modules(model: Any) -> list[float] | None:
    """The log-probabilities that modules compute."""
    engine = Engine(model, n_pages=8, prefix=False, start=False)
    engine._core.runner._decoder = None
    return scored(engine)


def patch(module: Any) -> None:
    forward = module.forward
    module.forward = lambda *args, **options: forward(*args, **options) * 2


def exchange(model: Any, *, assign: bool) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name in state:
        if name.endswith(("bias", "norm_weight", "norm.weight")):
            state[name] += 0.5
    model.load_state_dict(state, assign=assign)


CHANGES: dict[str, Any] = {
    "a layer": lambda model: patch(model.model.layers[1]),
    "a packed layer": lambda model: patch(model.model.layers[1].mlp.down_proj),
    "angles": lambda model: model.model.rotary_emb.inv_freq.mul_(1.5),
    "a part": lambda model: setattr(model.model.layers[1], "mlp", model.model.layers[0].mlp),
    "tensors": lambda model: exchange(model, assign=True),
    "numbers": lambda model: exchange(model, assign=False),
    "memory": lambda model: setattr(model.model.norm.weight, "data", torch.full((48,), 3.0)),
}


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_a_model_may_change_between_requests(kind: str, change: str) -> None:
    model = packed(kind)
    engine = Engine(model, n_pages=8, prefix=False, start=False)
    before = scored(engine)
    CHANGES[change](model)
    found = scored(engine)
    assert found == of_modules(model) != before
    assert scored(Engine(model, n_pages=8, prefix=False, start=False)) == found


def test_hooks_of_all_modules_are_called() -> None:
    model, seen = packed("llama"), []
    engine = Engine(model, n_pages=8, prefix=False, start=False)
    with torch.nn.modules.module.register_module_forward_hook(lambda *_: seen.append(1)):
        scored(engine)
    assert len(seen) > 3


def test_a_class_of_the_same_name_has_no_program() -> None:
    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        out = LlamaForCausalLM.forward(self, *arguments, **options)
        out.logits = out.logits * 2
        return out

    own = type("LlamaForCausalLM", (LlamaForCausalLM,), {"forward": forward})
    torch.manual_seed(0)
    model = pack(own(KINDS["llama"][1]).eval())
    assert scored(Engine(model, n_pages=8, prefix=False, start=False)) == of_modules(model)
    assert of_modules(model) != of_modules(packed("llama"))


@pytest.mark.parametrize("late", [False, True])
def test_the_forward_of_a_class_may_be_exchanged(
    monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    model, kind = packed("llama"), type(packed("llama").model.layers[0])
    real, engines = kind.forward, []
    if late:
        engines.append(Engine(model, n_pages=8, prefix=False, start=False))
        scored(engines[0])

    @functools.wraps(real)
    def forward(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **options) * 2

    monkeypatch.setattr(kind, "forward", forward)
    engines.append(Engine(model, n_pages=8, prefix=False, start=False))
    for engine in engines:
        assert scored(engine) == of_modules(model)


def test_an_index_out_of_range_ends_its_request_alone() -> None:
    model, table = packed("llama"), torch.zeros(4)
    engine = Engine(model, n_pages=64, prefix=False, start=False)
    alone = engine.submit([5, 6, 7], max_tokens=8, ignore_eos=True).result().tokens
    fine = engine.submit([5, 6, 7], max_tokens=8, ignore_eos=True)
    wrong = engine.submit(
        [1, 2, 3],
        max_tokens=8,
        ignore_eos=True,
        score_mod=lambda score, b, h, q, k: score + table[k],
    )
    assert fine.result().tokens == alone
    with pytest.raises(IndexError):
        wrong.result()
    engine.check_integrity()


def test_other_models_have_no_program() -> None:
    torch.manual_seed(0)
    plain = LlamaForCausalLM(KINDS["llama"][1]).eval()
    assert Engine(plain, n_pages=8, prefix=False, start=False)._core.runner._decoder is None
    windows = MistralConfig(**SIZES, sliding_window=16)
    model = pack(MistralForCausalLM(windows).eval())
    assert Engine(model, n_pages=64, start=False)._core.runner._decoder is None
