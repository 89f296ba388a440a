"""A headless Chromium, driven by its DevTools protocol over one WebSocket. No driver and no package besides."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_KEYS = {"Enter": (13, "\r"), "Tab": (9, ""), "Escape": (27, "")}
_START_SECONDS = 60.0


def chromium() -> str | None:
    """The program, where there is one."""
    return next((found for name in _PROGRAMS if (found := shutil.which(name)) is not None), None)


class Page:
    """One tab. `requests` are the addresses it has asked for, `complaints` its errors, violated policies included."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def listen(self) -> None:
        async for message in self._socket:
            content = message.json()
            if "id" in content:
                self._answers.pop(content["id"]).set_result(content)
                continue
            parameters = content["params"]
            if content["method"] == "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            elif content["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(parameters["exceptionDetails"]))
            elif content["method"] == "Log.entryAdded" and parameters["entry"]["level"] == "error":
                self.complaints.append(parameters["entry"]["text"])

    async def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        content = await asyncio.wait_for(answer, 30)
        assert "error" not in content, content
        return content["result"]

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def evaluate(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, *, seconds: float = 30) -> Any:
        """Waits for the expression to be true, and returns its value."""
        deadline = time.monotonic() + seconds
        while not (value := await self.evaluate(expression)):
            assert time.monotonic() < deadline, f"{expression}: {value!r}; {self.complaints}"
            await asyncio.sleep(0.05)
        return value

    async def write(self, text: str) -> None:
        """Into whatever has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        code, text = _KEYS[key]
        pressed = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", **pressed, **({"text": text} if text else {}))
        await self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    async def prefer(self, color_scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": color_scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def screenshot(self, *, width: int, height: int) -> bytes:
        """A PNG."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])


@asynccontextmanager
async def browser_page(program: str) -> AsyncIterator[Page]:
    """A tab of a browser of its own, with a profile that is thrown away."""
    with tempfile.TemporaryDirectory(prefix="reprise-browser-", ignore_cleanup_errors=True) as profile:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"]
        process = await asyncio.create_subprocess_exec(
            program,
            *(*flags, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = await _port(process, Path(profile) / "DevToolsActivePort")
            async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
                async with session.get("/json/list") as response:
                    tabs = [tab for tab in await response.json(content_type=None) if tab["type"] == "page"]
                async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    listening = asyncio.create_task(page.listen())
                    try:
                        yield page
                    finally:
                        listening.cancel()
                        await asyncio.gather(listening, return_exceptions=True)
        finally:
            process.terminate()
            await process.wait()


async def _port(process: asyncio.subprocess.Process, file: Path) -> int:
    """The port that the browser has chosen; it writes the file when it listens."""
    deadline = time.monotonic() + _START_SECONDS
    while True:
        lines = await asyncio.to_thread(_lines, file)
        if len(lines) >= 2:
            return int(lines[0])
        assert process.returncode is None, "the browser ended"
        assert time.monotonic() < deadline, "the browser does not listen"
        await asyncio.sleep(0.1)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []
