"""Examples of the names of `quire.integrations.transformers`; each cell is a program of its own."""

# %% quire.integrations.transformers.enable
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.integrations.transformers import enable
from quire.mods import sliding_window

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = enable(LlamaForCausalLM(config).eval(), mask=sliding_window(16))  # in every layer
with torch.no_grad():
    logits = model(torch.randint(64, (1, 40))).logits
assert logits.shape == (1, 40, 64)

# %% quire.integrations.transformers.register
from transformers import LlamaConfig, LlamaForCausalLM

from quire.integrations.transformers import register

register()  # importing the module has done it already
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
)
config._attn_implementation = "quire"
assert LlamaForCausalLM(config).config._attn_implementation == "quire"

# %% quire.integrations.transformers.NAME
from quire.integrations.transformers import NAME

assert NAME == "quire"  # AutoModelForCausalLM.from_pretrained(..., attn_implementation=NAME)

# %% quire.integrations.transformers.PagedCache
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quire.integrations.transformers import PagedCache, enable

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = enable(LlamaForCausalLM(config).eval())
prompt = torch.randint(1, 64, (1, 20))
cache = PagedCache(model.config)
text = model.generate(
    prompt,
    attention_mask=torch.ones_like(prompt),
    past_key_values=cache,
    max_new_tokens=4,
    do_sample=False,
    pad_token_id=0,
    eos_token_id=None,
)
assert text.shape == (1, 24) and cache.pages.statistics().tokens == 23

# %% quire.integrations.transformers.TokenMask
import torch

from quire.integrations.transformers import TokenMask
from quire.mods import causal

mask = TokenMask(seen=causal, padding=None, q_start=0, kv_start=0, shape=(1, 1, 8, 8))
assert mask.shape == (1, 1, 8, 8)  # transformers hands it to each layer as a prepared mask

# %% quire.integrations.transformers.AttentionWeightsWarning
import warnings

from quire.integrations.transformers import AttentionWeightsWarning

# A model that is asked for more than 2**26 attention weights of a layer gets none, with this
# warning. To make it an error:
with warnings.catch_warnings():
    warnings.simplefilter("error", AttentionWeightsWarning)

# %% quire.integrations.transformers.IgnoredAttentionWarning
import warnings

from quire.integrations.transformers import IgnoredAttentionWarning

# A model that does not look up its attention by name runs as it did, with this warning. To make it
# an error:
with warnings.catch_warnings():
    warnings.simplefilter("error", IgnoredAttentionWarning)
