"""Examples of the names of `quire.engine`; each cell is a program of its own."""

# %% quire.engine.Engine
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Engine
from quire.linear import pack

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
engine = Engine(pack(LlamaForCausalLM(config)), n_pages=100, start=False)
requests = [engine.submit([1, 2, 3 + n], max_tokens=5, ignore_eos=True) for n in range(3)]
for token in requests[0]:  # as they come; without a thread, reading computes steps
    print(token.token)
assert [len(request.result().tokens) for request in requests] == [5, 5, 5]


# %% quire.engine.Sampling
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Engine, Sampling
from quire.linear import pack

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
engine = Engine(pack(LlamaForCausalLM(config)), n_pages=100, start=False)
wanted = Sampling(max_tokens=6, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True)
one, two = (engine.submit([1, 2, 3], wanted).result() for _ in range(2))
assert one.tokens == two.tokens  # the seed decides, not who else is served


# %% quire.engine.Generation
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Engine
from quire.linear import pack

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
engine = Engine(pack(LlamaForCausalLM(config)), n_pages=100, start=False)
request = engine.submit([1, 2, 3], n=2, temperature=1.0, seed=3, max_tokens=4, ignore_eos=True)
assert len(request.answers) == 2  # two samples, which share the pages of the prompt
first = request.result()


# %% quire.engine.Answer
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Answer, Engine
from quire.linear import pack

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
engine = Engine(pack(LlamaForCausalLM(config)), n_pages=100, start=False)
request = engine.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
(answer,) = request.answers
assert isinstance(answer, Answer)
assert answer.result().finish_reason == "length"


# %% quire.engine.Completion
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Completion, Engine
from quire.linear import pack

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
engine = Engine(pack(LlamaForCausalLM(config)), n_pages=100, start=False)
(done,) = engine.generate([[1, 2, 3]], max_tokens=4, logprobs=0, ignore_eos=True)
assert isinstance(done, Completion)
assert len(done.tokens) == len(done.logprobs) == 4 and done.num_prompt == 3


# %% quire.engine.Token
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Engine, Token
from quire.linear import pack

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
engine = Engine(pack(LlamaForCausalLM(config)), n_pages=100, start=False)
request = engine.submit([1, 2, 3], max_tokens=4, logprobs=2, ignore_eos=True)
tokens = list(request)
assert all(isinstance(token, Token) and token.logprob <= 0 for token in tokens)
assert len(tokens[0].top_logprobs) == 2


# %% quire.engine.Event
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Engine, Event
from quire.linear import pack

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
engine = Engine(pack(LlamaForCausalLM(config)), n_pages=100, start=False)
events: list[Event] = []
engine.listen(events.append)
engine.generate([[1, 2, 3]], max_tokens=4, ignore_eos=True)
assert {"admit", "token", "finish"} <= {event.kind for event in events}


# %% quire.engine.EngineStatistics
from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Engine, EngineStatistics
from quire.linear import pack

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
engine = Engine(pack(LlamaForCausalLM(config)), n_pages=100, start=False)
engine.generate([[1, 2, 3], [4, 5]], max_tokens=4, ignore_eos=True)
found = engine.statistics()
assert isinstance(found, EngineStatistics)
assert found.finished == 2 and found.output_tokens == 8


# %% quire.engine.EngineWarning
import warnings

from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Engine, EngineWarning
from quire.linear import pack

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
engine = Engine(pack(LlamaForCausalLM(config)), n_pages=100, start=False)
engine.listen(lambda event: {}[event.kind])  # raises
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    (done,) = engine.generate([[1, 2, 3]], max_tokens=4, ignore_eos=True)
assert len(done.tokens) == 4 and seen[0].category is EngineWarning


# %% quire.engine.Grammar
from quire.engine import Grammar

yes_or_no = Grammar.regex("yes|no")  # engine.submit(prompt, grammar=yes_or_no)
person = Grammar.json_schema({"type": "object", "properties": {"name": {"type": "string"}}})
assert person.kind == "json_schema"
