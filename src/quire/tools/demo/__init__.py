"""The commands `quire demo`, `quire tour` and `quire chat`, which compute all that they print.

The demo of a mod: mod (the mod), check (is it right?), contest (time and memory), screen (the
output). With a language model, which needs transformers: talker (the model), chat (questions and
answers), tour_screen (the output of a tour), chat_screen (a conversation).
"""

from quire.tools.demo.screen import run

__all__ = ["run"]
