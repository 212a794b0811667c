"""Headless Chromium, driven by the DevTools protocol over a pipe: pages are opened, read, clicked and photographed.

Messages are JSON, each ended by a zero byte; the browser reads file descriptor 3 and writes 4. No package is needed.
Protocol: https://chromedevtools.github.io/devtools-protocol (`Page`, `Runtime`, `Input`, `Emulation`).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")
_OPTIONS: Final = (
    "--headless=new",
    "--no-sandbox",  # which needs rights that containers lack; only pages of our own are opened
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
)
PATIENCE_S: Final = 120.0


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A headless browser with one page; a context manager that ends it."""

    def __init__(self, width: int = 1280, height: int = 900) -> None:
        program = find_chromium()
        if program is None:
            raise RuntimeError(f"there is no browser: install one of {', '.join(NAMES)}")
        self._profile = tempfile.TemporaryDirectory(prefix="rl8x-chromium-", ignore_cleanup_errors=True)
        self._process, self._read, self._write = _start([program, *_OPTIONS, f"--user-data-dir={self._profile.name}"])
        self._buffer, self._number, self._session = b"", 0, None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Page.enable")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._write)  # the browser ends with its pipe
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._profile.cleanup()

    # -- pages

    def resize(self, width: int, height: int) -> None:
        """Set the page's size in CSS pixels, of which each is one of pictures."""
        self._ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, scheme: str) -> None:
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, address: str) -> None:
        """Open an address; of a page that is changed by scripts, wait for a text too."""
        self._ask("Page.navigate", url="about:blank")  # else another `#` of the same page would load nothing
        self._ask("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression in the page; raises `RuntimeError` if it throws."""
        found = self._ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{script}: {found['exceptionDetails']}")
        return found["result"].get("value")

    @property
    def text(self) -> str:
        """What the page shows, frames of the same origin included."""
        return str(self.run(_TEXT))

    def _wait(self, found: Callable[[], Any], problem: str) -> Any:
        """Wait until something is found, and return it; a `TimeoutError` has what the page shows."""
        deadline = time.monotonic() + PATIENCE_S
        while not (what := found()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{problem}; it shows:\n{self.text}")
            time.sleep(0.2)
        return what

    def wait_for(self, *texts: str) -> str:
        """Wait until the page shows all of some texts; returns what it shows then, or raises `TimeoutError`."""

        def shown() -> str | None:
            text = self.text
            return text if all(each in text for each in texts) else None

        return str(self._wait(shown, f"the page does not show all of {texts}"))

    def wait_until(self, condition: str) -> None:
        """Wait until a JavaScript expression is true in the page, as where a picture is loaded; or `TimeoutError`."""
        self._wait(lambda: self.run(condition), f"in the page it is never true that {condition}")

    def settle(self, quiet_s: float = 1.5) -> None:
        """Wait until nothing of the page has changed for a while, as where charts are drawn; or `TimeoutError`."""
        seen, since = "", time.monotonic()

        def is_quiet() -> bool:
            nonlocal seen, since
            now = str(self.run("document.readyState + document.documentElement.outerHTML.length"))
            if now != seen:
                seen, since = now, time.monotonic()
            return time.monotonic() - since >= quiet_s

        self._wait(is_quiet, "the page goes on changing")

    def click(self, text: str) -> None:
        """Click the smallest element whose whole text, or label, is this one, as a mouse does; or `TimeoutError`."""
        at = self._wait(lambda: self.run(f"({_FIND})({json.dumps(text)})"), f"there is no {text!r} to click")
        for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
            options = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self._ask("Input.dispatchMouseEvent", type=kind, x=at[0], y=at[1], **options)

    def screenshot(self, path: Path) -> Path:
        """Write a PNG of what is seen of the page."""
        data = self._ask("Page.captureScreenshot", format="png")["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))
        return path

    # -- the protocol

    def _ask(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(deadline, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])

    def _next(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._read, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError(f"the browser {'has ended' if ready else 'does not answer'}: {method}")
            self._buffer += data
        if time.monotonic() > deadline:  # it tells of events without an end
            raise RuntimeError(f"the browser does not answer: {method}")
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))


def _start(command: list[str]) -> tuple[subprocess.Popen[bytes], int, int]:
    """Start a browser with pipes as its descriptors 3 and 4; returns it, what it writes and what it reads."""
    theirs_read, ours_write = os.pipe()
    ours_read, theirs_write = os.pipe()
    # Above 3 and 4, so that putting them there overwrites neither of them.
    given = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (theirs_read, theirs_write)]

    def place() -> None:
        os.dup2(given[0], 3)
        os.dup2(given[1], 4)

    nowhere = subprocess.DEVNULL
    # What Python opens is closed in a child as it is: `close_fds` would close 3 and 4 too.
    process = subprocess.Popen(command, preexec_fn=place, close_fds=False, stdout=nowhere, stderr=nowhere)
    for each in (theirs_read, theirs_write, *given):
        os.close(each)
    return process, ours_read, ours_write


_TEXT: Final = """(() => {
  const texts = [document.body ? document.body.innerText : ""];
  for (const frame of document.querySelectorAll("iframe")) {
    try { texts.push(frame.contentDocument.body.innerText) } catch (error) { }
  }
  return texts.join("\\n");
})()"""

_FIND: Final = """text => {
  const shown = [...document.querySelectorAll("*")].filter(element =>
    (element.innerText || "").trim() === text || element.getAttribute("aria-label") === text);
  const sizes = shown.map(element => [element, element.getBoundingClientRect()]).filter(([, box]) => box.width > 0);
  if (!sizes.length) return null;
  const [element] = sizes.sort(([, a], [, b]) => a.width * a.height - b.width * b.height)[0];
  element.scrollIntoView({block: "nearest"});
  const box = element.getBoundingClientRect();
  return [box.x + box.width / 2, box.y + box.height / 2];
}"""
