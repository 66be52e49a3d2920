"""A small tokenizer of bytes, with a chat template, made in memory."""

from __future__ import annotations

import functools
import string
from typing import Any

import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = ["the quick brown fox jumps over the lazy dog", '{"name": "fox", "age": 12}', "Grüße 日本"]
SPECIAL = ["<|start|>", "<|end|>"]
TEMPLATE = (
    "{% for each in messages %}<|start|>{{ each['role'] }}\n{{ each['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)

# As Hermes and Qwen write tools, their calls and their results.
TOOL_TEMPLATE = """\
{%- if tools %}<|start|>system
Call functions between <tool_call> and </tool_call>. They are:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|end|>
{% endif %}
{%- for each in messages %}<|start|>{{ each.role }}
{{ each.content }}
{%- for call in each.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""


@functools.cache
def letters() -> Any:
    """Return a tokenizer for tiny_models: letters, digits, and an end."""
    spelled = [*string.ascii_letters, *string.digits[:8], "<|end|>"]
    tokenizer = Tokenizer(models.BPE({each: place for place, each in enumerate(spelled)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


@functools.cache
def byte_level(size: int = 300) -> Any:
    """Return a tokenizer as those of GPT-2, Llama 3 and SmolLM2, with `size` tokens at most."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", chat_template=TEMPLATE
    )
