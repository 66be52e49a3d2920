"""`quire demo`, `quire tour` and `quire chat`: all that they say is made while you watch.

The demo of a mod: mod (what is shown), check (is it right?), contest (what does it cost?), screen
(how it looks). With a language model, which needs transformers: talker (who speaks), chat (how it
is asked), tour_screen (how a tour of it looks), chat_screen (a conversation with it).
"""

from quire.tools.demo.screen import run

__all__ = ["run"]
