"""Small random models of transformers' families, each with eager attention and with quire."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import Tensor

from quire.integrations.transformers import enable

VOCABULARY = 61
WINDOW = 6
CHUNK = 8

CLOSE = {"rtol": 0.0, "atol": 2e-5}
LENGTHS = [5, 17, 11]
NEW = 12
GENERATE: dict[str, Any] = {
    "max_new_tokens": NEW,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_scores": True,
}

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large enough for attention to matter
}
_MIXED: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}

DECODERS: dict[str, hf.PreTrainedConfig] = {
    "llama": hf.LlamaConfig(**_DECODER),
    "qwen2": hf.Qwen2Config(**_DECODER, use_sliding_window=False),
    "qwen3": hf.Qwen3Config(**_DECODER, head_dim=16),
    "mistral": hf.MistralConfig(**_DECODER, sliding_window=WINDOW),
    "gemma2": hf.Gemma2Config(
        **_DECODER, **_MIXED, head_dim=8, sliding_window=WINDOW, attn_logit_softcapping=3.0
    ),
    "gemma3": hf.Gemma3TextConfig(**_DECODER, **_MIXED, head_dim=8, sliding_window=WINDOW),
    "gpt_oss": hf.GptOssConfig(
        **_DECODER,
        **_MIXED,
        head_dim=8,
        sliding_window=WINDOW,
        num_local_experts=3,
        num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "llama4": hf.Llama4TextConfig(
        **_DECODER,
        layer_types=["chunked_attention", "full_attention"],
        attention_chunk_size=CHUNK,
        head_dim=8,
        intermediate_size_mlp=40,
        num_local_experts=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    ),
    "gpt2": hf.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}
_LATENT: dict[str, Any] = {
    **_DECODER,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 20,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, hf.PreTrainedConfig] = {
    "deepseek_v2": hf.DeepseekV2Config(**_LATENT, **_EXPERTS, q_lora_rank=None),
    "deepseek_v3": hf.DeepseekV3Config(**_LATENT, **_EXPERTS, q_lora_rank=12),
    "glm4_moe_lite": hf.Glm4MoeLiteConfig(**_LATENT, **_EXPERTS, q_lora_rank=12),
    "minicpm3": hf.MiniCPM3Config(**_LATENT, q_lora_rank=12),
    "youtu": hf.YoutuConfig(**_LATENT, q_lora_rank=12),
}
"""Models whose layers give latents to their cache (MLA)."""
OTHERS: dict[str, hf.PreTrainedConfig] = {
    "phi3": hf.Phi3Config(**_DECODER),
    "olmo2": hf.Olmo2Config(**_DECODER),
    "granite": hf.GraniteConfig(**_DECODER),
    "cohere2": hf.Cohere2Config(**_DECODER, **_MIXED, sliding_window=WINDOW),
    "exaone4": hf.Exaone4Config(**_DECODER, **_MIXED, sliding_window=WINDOW),
    "starcoder2": hf.Starcoder2Config(**_DECODER),
    "gpt_neox": hf.GPTNeoXConfig(
        **{name: value for name, value in _DECODER.items() if name != "num_key_value_heads"}
    ),
    "opt": hf.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=128,
        init_std=0.3,
        dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    ),
}
"""Models that only a few tests try."""
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")

BERT = hf.BertConfig(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=40,
    initializer_range=0.3,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
WHISPER = hf.WhisperConfig(
    vocab_size=VOCABULARY,
    num_mel_bins=8,
    d_model=32,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=40,
    decoder_ffn_dim=40,
    max_source_positions=30,
    max_target_positions=40,
    decoder_start_token_id=1,
    bos_token_id=1,
    eos_token_id=None,
    pad_token_id=0,
    init_std=0.3,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
T5 = hf.T5Config(
    vocab_size=VOCABULARY,
    d_model=32,
    d_kv=8,
    d_ff=40,
    num_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=16,
    decoder_start_token_id=0,
    eos_token_id=None,
    pad_token_id=0,
    initializer_factor=1.0,
    dropout_rate=0.0,
)


class Pair(NamedTuple):
    """The same weights twice."""

    eager: Any
    ours: Any


def pair(kind: Any, config: hf.PreTrainedConfig) -> Pair:
    """A model with random weights, and its copy on quire."""
    torch.manual_seed(0)
    make = getattr(kind, "from_config", None) or kind._from_config  # of Auto classes, and of others
    eager = make(copy.deepcopy(config), attn_implementation="eager").eval()
    return Pair(eager, enable(copy.deepcopy(eager)))


def decoder(family: str) -> Pair:
    """A language model."""
    return pair(hf.AutoModelForCausalLM, (DECODERS | LATENT | OTHERS)[family])


class Batch(NamedTuple):
    """Tokens [B, S] and what is not padding."""

    input_ids: Tensor
    attention_mask: Tensor


def tokens(*shape: int, seed: int = 0) -> Tensor:
    """Anything but padding."""
    return torch.randint(1, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], side: str) -> Batch:
    """Texts of several lengths."""
    most = max(lengths)
    batch = Batch(
        torch.zeros(len(lengths), most, dtype=torch.long), torch.zeros(len(lengths), most)
    )
    for row, length in enumerate(lengths):
        place = slice(most - length, most) if side == "left" else slice(0, length)
        batch.input_ids[row, place] = tokens(length, seed=row)
        batch.attention_mask[row, place] = 1
    return batch


def assert_same_text(ours: Any, eager: Any, prompt: int) -> None:
    """Both have the same tokens; where they first differ, eager attention has nearly equal scores.

    Both are what `generate` returns with scores.
    """
    for row, (mine, wanted) in enumerate(zip(ours.sequences, eager.sequences, strict=True)):
        differ = (mine != wanted).nonzero()
        if len(differ):
            step = int(differ[0]) - prompt
            best, second = eager.scores[step][row].topk(2).values
            assert best - second < 1e-4, f"row {row} parts at new token {step}"
