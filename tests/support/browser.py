"""A headless Chromium, spoken to in the DevTools protocol over two pipes: what a page does where users open it."""

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
    """One tab. What it says of its own accord, requests and console lines among them, is in `events`."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._number, self._rest = to_browser, from_browser, 0, b""
        self.events: list[dict[str, Any]] = []
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda told: told.get("id") == self._number)
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Show a file at a width of so many pixels."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        if not any(told.get("method") == "Page.loadEventFired" for told in self.events):
            self._until(lambda told: told.get("method") == "Page.loadEventFired")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> None:
        """The whole page as a picture."""
        height = self.value("document.documentElement.scrollHeight")
        width = self.value("document.documentElement.clientWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        data = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """What is in the console since the page was opened."""
        return [
            json.dumps(told["params"])
            for told in self.events
            if told.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        ]

    def requests(self) -> list[str]:
        """The addresses that the page has asked for."""
        return [
            str(told["params"]["request"]["url"])[:200]
            for told in self.events
            if told.get("method") == "Network.requestWillBeSent"
        ]

    def _until(self, wanted: Any) -> dict[str, Any]:
        end = time.monotonic() + _LIMIT_S
        while True:
            while b"\0" in self._rest:
                message, _, self._rest = self._rest.partition(b"\0")
                told: dict[str, Any] = json.loads(message)
                if wanted(told):
                    return told
                self.events.append(told)
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece


@contextlib.contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own; it and all its processes have ended afterwards."""
    assert CHROMIUM is not None
    (hears, to_browser), (from_browser, says) = os.pipe(), os.pipe()
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    words += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    # The browser reads from descriptor 3 and writes to 4, whatever these two are here.
    line = ["bash", "-c", f'exec "$@" 3<&{hears} 4>&{says}', "bash", *words]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(line, pass_fds=(hears, says), start_new_session=True, **quiet)  # type: ignore[call-overload]
    for end in (hears, says):
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
