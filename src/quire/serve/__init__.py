"""The server: OpenAI's interface over HTTP for one engine, and a page that shows its pages.

    quire serve                              # SmolLM2 at 127.0.0.1:8000

A request goes through these files:

    guard.py        refuses what is too large, too slow, from elsewhere, or without a key
    app.py          the routes
    bodies.py       the JSON of requests, as types
    asking.py       from a body to prompts and sampling
    answering.py    from tokens to the JSON of answers, whole or as a stream
    process.py      the process: sockets, signals, a graceful end
"""

from __future__ import annotations
