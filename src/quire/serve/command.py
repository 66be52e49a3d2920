"""What `quire serve` does: load a model, make an engine, open a socket, serve."""

from __future__ import annotations

import importlib.util
import os
import secrets

from quire.errors import MissingPackageError
from quire.serve.options import Options, is_loopback

NEEDED = ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance", "jinja2")

# Whoever reaches Ray's ports can run code, so they are at the loopback, and ask for a token. Ray
# reads this when it is imported.
_RAY = {
    "RAY_AUTH_MODE": "token",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on every system: no address but the loopback
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # or it ends replicas when others fill the memory
    "RAY_worker_niceness": "0",  # replicas are all that this machine is to do
}


def serve(options: Options) -> None:
    """Serve a model until a signal comes."""
    needed = NEEDED if not options.replicas else (*NEEDED, "ray")
    absent = [name for name in needed if importlib.util.find_spec(name) is None]
    if absent:
        extra = "ray" if absent == ["ray"] else "serve"
        raise MissingPackageError(
            f"{', '.join(absent)} must be installed for serve, but cannot be found. Install: "
            f"pip install 'quire[{extra}]'."
        )
    from quire.serve import process
    from quire.serve.app import Service

    if not is_loopback(options.host) and not options.keys():
        print("quire: all who can reach this address may ask. Give --api-key to change that.")
    bound = process.listen(options.host, options.port)  # before the model: a port may be taken
    if options.replicas:
        os.environ |= _RAY | {"RAY_AUTH_TOKEN": secrets.token_hex(32)}
        from quire.serve import replicas

        replicas.run(options, bound)
        return
    settings = options.settings()
    with options.engine() as engine:
        service = Service(engine, settings)
        process.announce(settings, bound)
        process.run(service.app(), settings, bound)
