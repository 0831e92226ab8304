"""A headless Chromium, controlled over two pipes, to see what a page does where users open it."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_LIMIT_S = 60.0


class Browser:
    """One tab. Messages that it sends by itself, such as requests and console lines, are in `events`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._number, self._rest = to_browser, from_browser, 0, b""
        self.events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda event: event.get("id") == self._number)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Show a file at a width in pixels."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        if not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self._until(lambda event: event.get("method") == "Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """Write a picture of the whole page."""
        height = self.value("document.documentElement.scrollHeight")
        width = self.value("document.documentElement.clientWidth")
        path.write_bytes(self.picture(width, height))

    def picture(self, width: int, height: int, scale: float = 1.0) -> bytes:
        """Return the left upper part of the page as a PNG, with `scale` pixels for each of its own."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        return base64.b64decode(data)

    def complaints(self) -> list[str]:
        """Return what was written to the console since the page was opened."""
        return [
            json.dumps(event["params"])
            for event in self.events
            if event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        ]

    def requests(self) -> list[str]:
        """Return the addresses that the page has requested."""
        return [
            str(event["params"]["request"]["url"])[:200]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]

    def _until(self, is_wanted: Any) -> dict[str, Any]:
        end = time.monotonic() + _LIMIT_S
        while True:
            while b"\0" in self._rest:
                message, _, self._rest = self._rest.partition(b"\0")
                event: dict[str, Any] = json.loads(message)
                if is_wanted(event):
                    return event
                self.events.append(event)
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece


@contextlib.contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """Start a browser with a profile of its own; it has ended afterwards with all its processes."""
    assert CHROMIUM is not None
    (input_end, to_browser), (from_browser, output_end) = os.pipe(), os.pipe()
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    words += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    # The browser reads from descriptor 3 and writes to 4, whatever these two are here.
    line = ["bash", "-c", f'exec "$@" 3<&{input_end} 4>&{output_end}', "bash", *words]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(line, pass_fds=(input_end, output_end), start_new_session=True, **quiet)  # type: ignore[call-overload]
    for end in (input_end, output_end):
        os.close(end)
    try:
        browser = Browser(to_browser, from_browser)
        yield browser
        browser.call("Browser.close")
        process.wait(20)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)
        for end in (to_browser, from_browser):
            os.close(end)
