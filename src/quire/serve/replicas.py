"""Several replicas of a server on Ray Serve, on this machine or on a cluster.

    quire serve --replicas 2          # `run`: a front in this process, replicas beside it
    serve deploy serve.yaml           # `application`: the same on a cluster, behind Ray's proxies

Each replica is a process with an engine of its own. Answers do not depend on which one writes them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import AsyncIterator
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp, Message

from quire.serve import process
from quire.serve.app import Service
from quire.serve.front import Front
from quire.serve.options import Options
from quire.serve.routing import SPARE, Forwarded, PrefixRouter

Part = tuple[int, dict[str, str]] | bytes


class Replica:
    """An engine, and the routes of a server over it."""

    def __init__(self, options: dict[str, Any]) -> None:
        given = Options(**options)
        torch.set_num_threads(given.threads or 1)
        self._engine = given.engine()
        self._service = Service(self._engine, given.settings())
        self._app = self._service.inner()
        self._name = serve.get_replica_context().replica_id.unique_id

    def check_health(self) -> None:
        """Raise if the engine has failed: Ray then starts another replica."""
        if not self._engine.is_alive:
            raise RuntimeError("the engine has failed")

    async def answer(self, call: Forwarded) -> AsyncIterator[Part]:
        """Return the status and the headers of an answer, then the parts of its body."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()

        async def run() -> None:
            try:
                await self._app(_scope(call), _forever, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            start = await messages.get()
            assert start is not None and start["type"] == "http.response.start"
            headers = {name.decode(): value.decode() for name, value in start["headers"]}
            yield start["status"], headers | {"x-replica": self._name}
            while (message := await messages.get()) is not None:
                parts = [message["body"]]
                while not messages.empty() and (message := messages.get_nowait()) is not None:
                    parts.append(message["body"])
                if content := b"".join(parts):
                    yield content
                if message is None:
                    break
            await task
        finally:
            task.cancel()  # does nothing if it is finished


async def _forever() -> Message:
    """Wait. If the client goes, Ray cancels the call."""
    await asyncio.Event().wait()
    raise AssertionError("nobody sets the event")


def _scope(call: Forwarded) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": call.method,
        "path": call.path,
        "raw_path": call.path.encode(),
        "query_string": b"",
        "headers": [],
        "state": {"body": call.body, "tenant": call.tenant},
    }


@serve.ingress()
class Door:
    """The front, behind the proxies of a cluster."""

    def __init__(self, handle: Any, options: dict[str, Any]) -> None:
        given = Options(**options)
        self._front = Front(handle, given.settings(), given.replicas)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application: Ray calls this."""
        return self._front.app()


def deployment(options: Options) -> Any:
    """Return the replicas, for `serve.run`."""
    made = serve.deployment(Replica).options(
        name="Replica",
        num_replicas=options.replicas,
        max_ongoing_requests=options.max_ongoing + SPARE,
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=process.GRACE,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter, max_backoff_s=0.2
        ),
        ray_actor_options={"num_cpus": options.threads or 1},
    )
    # The front has checked the keys, so that replicas need not know them.
    return made.bind(dataclasses.replace(options, api_keys=(), api_keys_file=None).plain())


def application(args: dict[str, Any]) -> Any:
    """Return the application of a serve.yaml. `args` are the fields of `Options`."""
    options = Options(**args)
    options = dataclasses.replace(options, replicas=max(1, options.replicas))
    door = serve.deployment(Door).options(
        name="Door", max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0}
    )
    return door.bind(deployment(options), options.plain())


def run(options: Options, bound: socket.socket) -> None:
    """Start Ray on this machine, and serve until a signal comes."""
    if options.threads is None:
        share = max(1, torch.get_num_threads() // options.replicas)
        options = dataclasses.replace(options, threads=share)
    settings = options.settings()
    ray.init(
        address="local",
        num_cpus=options.replicas * (options.threads or 1),
        include_dashboard=False,
        object_store_memory=100 << 20,
        logging_level="error",
    )
    try:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        quietly = LoggingConfig(log_level="ERROR", enable_access_log=False)
        serve.start(proxy_location="Disabled", logging_config=quietly)
        handle = serve.run(
            deployment(options), name="quire", route_prefix=None, logging_config=quietly
        )
        front = Front(handle, settings, options.replicas)
        process.announce(settings, bound)
        process.run(front.app(), settings, bound)
    finally:
        ray.shutdown()
