"""A real browser for tests: Debian's Chromium, headless, driven through ChromeDriver's own protocol (W3C WebDriver).

The protocol is JSON over HTTP, so nothing is needed beside the two Debian packages chromium and chromium-driver.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--disable-dev-shm-usage"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # a page that asks for anything else fails
)
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The protocol's name for a reference to an element."""
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs Debian's packages chromium and chromium-driver"
)


@dataclass(frozen=True)
class Browser:
    """A browser window. address: of its session at the driver."""

    address: str

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A command of the protocol."""
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.address + path, data, {"content-type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None

    def open(self, address: str) -> None:
        """Open a page and wait until its script has drawn it."""
        self.ask("POST", "/url", {"url": address})
        self.wait("return document.documentElement.dataset.ready === '1'")

    def run(self, script: str, *values: Any) -> Any:
        """The value that a script returns on the page."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": values})

    def wait(self, script: str, seconds: float = 30.0) -> Any:
        """Wait until the script returns something true."""
        end = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < end, f"the page never reached: {script}"
            time.sleep(0.05)
        return found

    def click(self, selector: str) -> None:
        """Click the first element of a CSS selector as a person would: it must be there to be hit."""
        found = self.ask("POST", "/element", {"using": "css selector", "value": selector})
        self.run("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", found)
        self.ask("POST", f"/element/{found[ELEMENT]}/click")

    def press(self, *keys: str) -> None:
        """Press and release keys, one after the other; names as in the protocol, such as the code of Tab."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def resize(self, width: int, height: int) -> None:
        """The size of the page's own area, also below what a window may have."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.command("Emulation.setDeviceMetricsOverride", size)

    def command(self, name: str, parameters: Any) -> Any:
        """A command of Chromium's DevTools."""
        return self.ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def use_scheme(self, scheme: str) -> None:
        """Ask pages for their "light" or "dark" look."""
        self.command("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def read_errors(self) -> list[str]:
        """What the console complained of since the last call, and every request that went to a network."""
        return [entry["message"] for entry in self.ask("POST", "/se/log", {"type": "browser"})]

    def take_picture(self, file: Path, whole: bool = True) -> None:
        """A screenshot of the whole page, or of what the window shows."""
        made = self.command("Page.captureScreenshot", {"format": "png", "captureBeyondViewport": whole})
        file.write_bytes(base64.b64decode(made["data"]))

    def print_page(self) -> bytes:
        """The page as it would be printed, as PDF."""
        return base64.b64decode(self.ask("POST", "/print", {"background": True}))


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile, closed at the end."""
    assert CHROMIUM
    assert DRIVER
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    whole = Browser(f"http://127.0.0.1:{port}")
    try:
        session = _start_session(whole, profile)
        window = Browser(f"{whole.address}/session/{session}")
        try:
            yield window
        finally:
            window.ask("DELETE", "")
    finally:
        driver.terminate()
        driver.wait(30)


def _start_session(whole: Browser, profile: Path) -> str:
    options = {"binary": CHROMIUM, "args": [*FLAGS, f"--user-data-dir={profile}", "--window-size=1200,900"]}
    wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
    end = time.monotonic() + 60
    while True:
        try:
            return str(whole.ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"])
        except (OSError, AssertionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
