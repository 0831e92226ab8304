"""A headless Chromium, controlled over two pipes."""

import base64
import contextlib
import io
import json
import os
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One tab; `events` has its messages, such as requests and console lines."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._number, self._rest, self._session = to_browser, from_browser, 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session and not method.startswith(("Target.", "Browser.")):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._until("id", self._number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, path: Path, *, width: int, dark: bool = False) -> None:
        """Show a file at a width in pixels."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        if not self._parameters("Page.loadEventFired"):
            self._until("method", "Page.loadEventFired")

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, selector: str) -> Image.Image:
        area = self.value(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
        shown = self.call("Page.captureScreenshot", clip={**area, "scale": 1}, captureBeyondViewport=True)
        return Image.open(io.BytesIO(base64.b64decode(shown["data"])))

    def complaints(self) -> list[str]:
        """Return all console output since the page was opened."""
        kinds = "Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"
        return [json.dumps(parameters) for parameters in self._parameters(*kinds)]

    def requests(self) -> list[str]:
        return [event["request"]["url"][:200] for event in self._parameters("Network.requestWillBeSent")]

    def _parameters(self, *methods: str) -> list[dict[str, Any]]:
        return [event["params"] for event in self.events if event.get("method") in methods]

    def _until(self, key: str, value: object) -> dict[str, Any]:
        while True:
            while b"\0" in self._rest:
                message, _, self._rest = self._rest.partition(b"\0")
                event = json.loads(message)
                if event.get(key) == value:
                    return event
                self.events.append(event)
            ready, _, _ = select.select([self._from], [], [], 200)
            assert ready, "the browser does not answer"
            piece = os.read(self._from, 1 << 16)
            assert piece, "the browser has ended"
            self._rest += piece


@contextlib.contextmanager
def opened(profile: Path) -> Iterator[Browser]:
    """Start a browser with its own profile, and end all its processes afterwards."""
    (input_end, to_browser), (from_browser, output_end) = os.pipe(), os.pipe()
    words = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    words += ["--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    # The browser reads from descriptor 3 and writes to 4.
    line = ["bash", "-c", f'exec "$@" 3<&{input_end} 4>&{output_end}', "bash", *words]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = subprocess.Popen(line, pass_fds=(input_end, output_end), start_new_session=True, **quiet)
    for end in (input_end, output_end):
        os.close(end)
    try:
        browser = Browser(to_browser, from_browser)
        yield browser
        browser.call("Browser.close")
        process.wait(200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(200)
        for end in (to_browser, from_browser):
            os.close(end)
