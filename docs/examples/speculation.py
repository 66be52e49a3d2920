"""Examples of the names of `quire.engine.speculation`; each cell is a program of its own."""

# %% quire.engine.speculation.PromptLookup
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Engine
from quire.engine.speculation import PromptLookup
from quire.linear import pack

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
engine = Engine(pack(LlamaForCausalLM(config)), n_pages=100, start=False)
prompt = [5, 6, 7, 8, 9, 5, 6, 7]  # what followed 5, 6, 7 before is guessed to follow again
plain = engine.submit(prompt, max_tokens=8, ignore_eos=True).result()
guessed = engine.submit(prompt, max_tokens=8, ignore_eos=True, drafter=PromptLookup()).result()
assert guessed.tokens == plain.tokens  # a guess can only save time


# %% quire.engine.speculation.DraftModel
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Engine
from quire.engine.speculation import DraftModel
from quire.linear import pack

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
model = pack(LlamaForCausalLM(config))
fewer = LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1})
small = pack(LlamaForCausalLM(fewer))  # has the tokens of the large model
drafts = DraftModel(small, widths=(2, 1), n_pages=100)
engine = Engine(model, n_pages=100, drafts=drafts, start=False)
assert len(engine.submit([5, 6, 7], max_tokens=8, ignore_eos=True).result().tokens) == 8


# %% quire.engine.speculation.DraftTree
from quire.engine.speculation import DraftTree

tree = DraftTree([5, 6, 9, 6], parents=[-1, 0, 0, -1])  # two guesses, two more after the first
assert tree.paths == [[5, 6], [5, 9], [6]]


def drafter(tokens):  # for engine.submit(..., drafter=drafter)
    return tree if tokens[-1] == 4 else []
