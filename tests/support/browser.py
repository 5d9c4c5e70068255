"""Chromium without a window, driven by its DevTools protocol over a pipe, for measuring and testing pages."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless", "--no-sandbox", "--no-first-run", "--disable-background-networking", "--hide-scrollbars",
    "--enable-unsafe-swiftshader",  # WebGL without a graphics card
)  # fmt: skip
_AT_3_AND_4 = """
import os, sys
read, written = (os.dup(int(number)) for number in sys.argv[1:3])
while min(read, written) < 5:
    read, written = os.dup(read), os.dup(written)
os.dup2(read, 3)
os.dup2(written, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""A program that becomes the browser, which reads its file descriptor 3 and writes 4."""


class Browser:
    """One page in Chromium; a context manager that ends the browser.

    Args:
        profile: a folder for the browser's own files.
        scripts: whether pages may run scripts.
        flags: more words for Chromium's command line.

    Attributes:
        requests: the addresses that pages asked for, without `data:` and `blob:`.
        errors: uncaught exceptions and errors on the console.
    """

    def __init__(self, profile: Path, *, scripts: bool = True, flags: tuple[str, ...] = ()) -> None:
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._number = 0
        self._loaded: set[str] = set()
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        pipes = (to_browser, from_browser)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _AT_3_AND_4, *map(str, pipes), str(CHROMIUM), *_FLAGS, *flags,
             f"--user-data-dir={profile}", "--remote-debugging-pipe"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=pipes,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        target = self.call_browser("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call_browser("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.call("Page.setLifecycleEventsEnabled", enabled=True)
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._out)  # it ends itself
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)

    def open(self, page: Path) -> None:
        """Open a file and wait for its `load` event."""
        loader = self.call("Page.navigate", url=page.as_uri())["loaderId"]
        while loader not in self._loaded:
            self._receive()

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression on the page, or of what it promises."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"].get("exception", {}).get("description", str(done)))
        return done["result"].get("value")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        """Wait until a JavaScript expression is true."""
        until = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > until:
                raise TimeoutError(f"{condition} was not true after {seconds} s; errors: {self.errors}")
            time.sleep(0.05)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Press the mouse at a place of the window, move it and let go, as a hand does; in pixels."""
        middle = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2)
        steps = [("mouseMoved", start), ("mousePressed", start), ("mouseMoved", middle), ("mouseMoved", end)]
        for kind, (x, y) in [*steps, ("mouseReleased", end)]:
            pressed = {"button": "left", "clickCount": 1} if kind != "mouseMoved" else {"buttons": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def screenshot(self, path: Path, width: int = 1200, height: int = 900, *, dark: bool = False) -> None:
        """Write a PNG of the page, `height` pixels from its top."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        time.sleep(0.5)  # for what follows a change of size
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command of the protocol, and return its result."""
        return self._call(method, parameters, self._session)

    def call_browser(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command that is for the browser and not for its page."""
        return self._call(method, parameters, "")

    def _call(self, method: str, parameters: dict[str, Any], session: str) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while (answer := self._receive()).get("id") != self._number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    def _receive(self) -> dict[str, Any]:
        """The next message, whose events are noted."""
        while b"\0" not in self._buffer:
            part = os.read(self._in, 1 << 16)
            if not part:
                raise RuntimeError("Chromium has ended.")
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, told: dict[str, Any]) -> None:
        if event == "Page.lifecycleEvent" and told["name"] == "load":
            self._loaded.add(told["loaderId"])
        elif event == "Network.requestWillBeSent":
            address = told["request"]["url"]
            if not address.startswith(("data:", "blob:")):
                self.requests.append(address)
        elif event == "Runtime.exceptionThrown":
            details = told["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description") or details["text"])
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(part.get("value")) for part in told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] == "error":
            self.errors.append(told["entry"]["text"])
