"""Continuous batching: many requests, one batch, nobody notices the others.

    engine = Engine.from_pretrained("SmolLM2-135M-Instruct", weights="int8", max_bytes=2 << 30)
    request = engine.submit(prompt, max_tokens=64, temperature=0.8, seed=7, stop=["\\n\\n"])
    for token in request: ...            # also: async for, request.cancel(), request.result()

Reading order: engine (what users call), core (the four functions of a step), job (an answer and its
sequences), scheduler (who is computed), runner (the packed call of the model), answers (what users
read), arguments (what is checked), gap (between two steps), sampling (how a token is chosen, and
beams), speculation (guesses), prompts, loading, events.
"""

from quire.engine.answers import Answer, Completion, Generation, Token
from quire.engine.engine import Engine
from quire.engine.events import EngineStatistics, EngineWarning, Event
from quire.engine.sampling import Grammar, Sampling

__all__ = [
    "Answer",
    "Completion",
    "Engine",
    "EngineStatistics",
    "EngineWarning",
    "Event",
    "Generation",
    "Grammar",
    "Sampling",
    "Token",
]
