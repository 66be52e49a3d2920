"""Examples of the names of `quire.serve`; each cell is a program of its own."""

# %% quire.serve.serve
import socket

from quire.errors import ArgumentError
from quire.serve import Options, serve

taken = socket.create_server(("127.0.0.1", 0))
port = taken.getsockname()[1]
try:
    serve(Options(model="SmolLM2-135M-Instruct", port=port))  # returns after a signal
except ArgumentError as error:
    print(error)  # the port is taken; this is said before a model is loaded
taken.close()


# %% quire.serve.Options
from quire.mods import sliding_window
from quire.serve import Options

options = Options(model="models/mine", mask=sliding_window(512), api_keys=("a-secret",))
settings = options.settings()
assert settings.model == "mine"  # the name that clients give
assert settings.tenant("Bearer a-secret") and settings.tenant("Bearer another") is None


# %% quire.serve.Settings
from quire.serve import Settings

settings = Settings(model="mine", api_keys=("a secret", "of another"), max_ongoing=64)
one, two = (settings.tenant(f"Bearer {key}") for key in settings.api_keys)
assert one != two  # clients with other keys share no prefixes
assert settings.tenant(None) is None


# %% quire.serve.Service
import asyncio

from transformers import LlamaConfig, LlamaForCausalLM

from quire.engine import Engine
from quire.linear import pack
from quire.serve import Service, Settings

config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
)
engine = Engine(pack(LlamaForCausalLM(config)), n_pages=100, start=False)
app = Service(engine, Settings(model="mine")).app()  # for uvicorn, or mounted in an app of yours


async def asked(path):
    """Ask as a server does, by ASGI, and return the status."""
    said = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        said.append(message)

    headers = [(b"host", b"localhost")]
    request = {"type": "http", "method": "GET", "path": path, "headers": headers}
    request |= {"query_string": b"", "root_path": "", "client": ("127.0.0.1", 1), "asgi": {}}
    request |= {"raw_path": path.encode(), "http_version": "1.1", "scheme": "http", "state": {}}
    await app(request, receive, send)
    return said[0]["status"]


assert asyncio.run(asked("/v1/models")) == 200
