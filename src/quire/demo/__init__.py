"""`quire demo` and `quire chat`: everything that they say is made while you watch.

The demo of a mod: mod (what is shown), check (is it right?), contest (what does it cost?), screen
(how it looks). The demo of a language model, which needs transformers: talker (who speaks), chat
(what is asked), chat_screen (how it looks).
"""

from quire.demo.screen import run

__all__ = ["run"]
