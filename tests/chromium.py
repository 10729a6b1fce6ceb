"""A headless Chromium, driven over its debugging pipe (file descriptors 3 and 4): no driver, no port, no package."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROGRAM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), "")
# As root, in a container, without a GPU or shared memory; nothing fetched in the background.
OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
REDIRECT = 'exec 3<&"$READ" 4>&"$WRITE"; exec "$@"'
PATIENCE_S = 600.0


@dataclass
class Page:
    """One tab. problems: console errors, exceptions and failed loads; requests: every address it asked for."""

    write_to: int
    read_from: int
    session: str = ""
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    sent: int = 0
    pending: bytes = b""

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A DevTools command's result."""
        self.sent += 1
        message = {"id": self.sent, "method": method, "params": params}
        message |= {"sessionId": self.session} if self.session else {}
        os.write(self.write_to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.sent:
            self._note(answer)
        assert "error" not in answer, answer
        return answer["result"]

    def open(self, path: Path) -> None:
        """Load a file and wait until it is there."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        self.call("Page.navigate", url=path.resolve().as_uri())
        while (event := self._next()).get("method") != "Page.loadEventFired":
            self._note(event)

    def view(self, *, width: int, theme: str) -> None:
        """A window of `width` pixels, in a "light" or "dark" theme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page, however long, as a PNG file."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        while b"\0" not in self.pending:
            ready, _, _ = select.select([self.read_from], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"Chromium did not answer in {PATIENCE_S:g} s"
            part = os.read(self.read_from, 1 << 20)
            assert part, "Chromium ended"
            self.pending += part
        message, _, self.pending = self.pending.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(str(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A tab of a Chromium of its own, whose files go to `profile`; ended with the block."""
    (their_input, our_output), (our_input, their_output) = os.pipe(), os.pipe()
    command = ["bash", "-c", REDIRECT, "bash", PROGRAM, *OPTIONS, f"--user-data-dir={profile}"]
    environment = {**os.environ, "READ": str(their_input), "WRITE": str(their_output)}
    process = subprocess.Popen(
        command,
        env=environment,
        pass_fds=(their_input, their_output),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(their_input)
    os.close(their_output)
    try:
        yield Page(write_to=our_output, read_from=our_input)
    finally:
        os.close(our_output)  # Chromium ends when its pipe does
        os.close(our_input)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
