"""How one request chooses its tokens.

    vocabulary = Vocabulary(tokenizer, size=49152)
    sampler = Sampler(Sampling(max_tokens=64, temperature=0.8, seed=7), prompt, vocabulary)
    while sampler.finished is None:
        found = sampler.sample(logits)      # [V] of the next position; changes nothing
        sampler.accept(found.token)         # the answer is one token longer
    sampler.text

`Sampling` is what a request asks for. A `Sampler` is the state of one request and knows no other
one, so a token depends on its own logits, the seed and the number of tokens before it alone.
"""

from __future__ import annotations

from quire.engine.sampling.beams import Beam, Beams
from quire.engine.sampling.grammar import Grammar
from quire.engine.sampling.options import Sampling
from quire.engine.sampling.sampler import Sampled, Sampler
from quire.engine.sampling.vocabulary import Vocabulary

__all__ = ["Beam", "Beams", "Grammar", "Sampled", "Sampler", "Sampling", "Vocabulary"]
