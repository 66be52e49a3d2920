"""A headless Chromium that tests drive through a pipe, by the protocol of its developer tools."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")


def executable() -> str | None:
    """Return the path of a Chromium, or None."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """A page that is open."""

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies = commands, replies
        self._rest, self._number = b"", 0
        self._scope: dict[str, str] = {}
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._scope = {"sessionId": attached["sessionId"]}
        self.problems: list[str] = []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Send a command, and return its result."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters, **self._scope}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._next()
            if reply.get("id") == number:
                assert "error" not in reply, reply["error"]
                return reply["result"]
            self._note(reply)

    def _next(self) -> Any:
        while b"\0" not in self._rest:
            part = os.read(self._replies, 1 << 16)
            assert part, "the browser has ended"
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: Any) -> None:
        """Keep what the page complains of."""
        if event["method"] == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["params"]["exceptionDetails"])[:400])
        if event["method"] == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.problems.append(event["params"]["entry"]["text"])

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the page a size, and light or dark colours."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        """Return the value of a script."""
        found = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> Any:
        """Wait until a script has a value that is true, and return it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := self.evaluate(script):
                return found
            time.sleep(0.05)
        raise AssertionError(f"{script} is not true after {seconds} s")

    def type(self, text: str) -> None:
        """Type text into what has the focus."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **({"text": text} if text and kind == "keyDown" else {}),
            )

    def picture(self, path: Path) -> None:
        """Write what can be seen to a file."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def browser() -> Iterator[Tab]:
    """Start Chromium, give a tab of it, and end it."""
    path = executable()
    assert path is not None, "ask for executable() first"
    commands, to_browser = os.pipe()
    from_browser, replies = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--remote-debugging-pipe", "--no-first-run", f"--user-data-dir={profile}"]
        # The browser reads commands from descriptor 3 and writes replies to descriptor 4.
        script = f'exec "$0" "$@" 3<&{commands} 4>&{replies}'
        process = subprocess.Popen(
            ["bash", "-c", script, path, *options],
            pass_fds=(commands, replies),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(replies)
        try:
            yield Tab(to_browser, from_browser)
        finally:
            process.kill()
            process.wait()
            os.close(to_browser)
            os.close(from_browser)
