"""The page at /: closed to everything from elsewhere, and used as a person uses it, in a real browser, by keyboard."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.browser import Page, browser_page, chromium
from tests.support.engine_server import RunningServer, fake_options, running_server

KEY = "sk-only-in-memory"
IN_BROWSER = pytest.mark.skipif(chromium() is None, reason="no Chromium is installed")


def test_the_page_allows_its_own_script_and_style_only(tmp_path: Path) -> None:
    with running_server(fake_options(tmp_path, api_keys=(KEY,))) as server:
        response = server.client.get("/")
        assert server.client.get("/v1/models").status_code == 401, "the page is open, the API is not"
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    for directive, element in (("script-src", "script"), ("style-src", "style")):
        [inline] = re.findall(rf"<{element}[^>]*>(.*?)</{element}>", response.text, re.DOTALL)
        assert policy[directive] == f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"
    assert "unsafe" not in response.headers["content-security-policy"]
    assert not re.search(r"https?://|<script[^>]+src|<link[^>]+href=\"(?!data:)|\son\w+=", response.text)
    for store in ("localStorage", "sessionStorage", "document.cookie", "indexedDB", "innerHTML"):
        assert store not in response.text


@pytest.fixture
async def page() -> AsyncIterator[Page]:
    program = chromium()
    assert program is not None
    async with browser_page(program) as opened:
        yield opened


async def figures(page: Page, turn: int) -> dict[str, Any]:
    """What the page tells below an answer."""
    await page.until(f"document.querySelectorAll('.figures').length === {turn}")
    text = await page.evaluate(f"document.querySelectorAll('.figures')[{turn - 1}].innerText")
    found = {
        name: int(number.replace(",", "")) for number, name in re.findall(r"([\d,]+) (cached|computed|token)", text)
    }
    widths = await page.evaluate(
        f"[...document.querySelectorAll('.bar')[{turn - 1}].children].map((part) => part.getBoundingClientRect().width)"
    )
    assert re.search(r"first token \d+\.\d\d s", text)
    return found | {"share": widths[0] / sum(widths)}


def no_complaints(page: Page, server: RunningServer) -> None:
    assert page.complaints == []
    assert page.requests
    assert all(url.startswith((server.url, "data:")) for url in page.requests)


@IN_BROWSER
async def test_a_conversation_by_keyboard_shows_what_was_cached(tmp_path: Path, page: Page) -> None:
    with running_server(fake_options(tmp_path)) as server:
        await page.open(server.url)
        await page.until("document.getElementById('model').options.length === 2")
        assert await page.evaluate("document.activeElement.id") == "text", "ready to type"
        await page.write("hello there")
        await page.press("Enter")
        first = await figures(page, 1)
        prompt = "u:hello there|A"
        answer = await page.evaluate("document.querySelector('.answer').textContent")
        assert first == {"cached": 0, "computed": len(prompt), "token": len(answer) + 1, "share": 0.0}
        assert answer == "".join(map(chr, range(ord("B"), ord("z") + 1)))
        await page.write("more")
        await page.press("Enter")
        second = await figures(page, 2)
        assert second["cached"] == len("u:hello there|")
        both = f"u:hello there|a:{answer}|u:more|A"
        assert second["cached"] + second["computed"] == len(both)
        assert second["share"] == pytest.approx(second["cached"] / len(both), abs=0.01)
        total = len(prompt) + len(both)
        shown = await page.evaluate("document.getElementById('total').textContent")
        assert shown == f"{round(100 * second['cached'] / total)} % of {total} prompt tokens cached"
        await page.press("Tab")
        assert await page.evaluate("document.activeElement.id") == "send", "there is nothing to stop"
        no_complaints(page, server)


@IN_BROWSER
async def test_a_key_is_asked_for_and_kept_in_memory_only(tmp_path: Path, page: Page) -> None:
    with running_server(fake_options(tmp_path, api_keys=(KEY,))) as server:
        await page.open(server.url)
        await page.until("document.getElementById('hint').textContent.includes('API key is missing or wrong')")
        await page.evaluate("document.getElementById('key').focus()")
        await page.write(KEY)
        await page.press("Tab")
        await page.until("document.getElementById('model').options.length === 2")
        await page.evaluate("document.getElementById('text').focus()")
        await page.write("hi")
        await page.press("Enter")
        await figures(page, 1)
        kept = "JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])"
        assert KEY not in await page.evaluate(kept)
        assert await page.evaluate("document.getElementById('key').type") == "password"
        page.complaints = [line for line in page.complaints if "401" not in line]  # of the request without a key
        no_complaints(page, server)


@IN_BROWSER
async def test_escape_stops_an_answer_and_an_error_is_shown(tmp_path: Path, page: Page) -> None:
    with running_server(fake_options(tmp_path, builder="build_slow")) as server:
        await page.open(server.url)
        await page.until("document.getElementById('model').options.length === 2")
        await page.write("a long answer")
        await page.press("Enter")
        await page.until("document.querySelector('.answer')?.textContent.length > 3")
        await page.press("Escape")
        await page.until("document.querySelector('.wrong')?.textContent === 'Stopped.'")
        async with asyncio.timeout(10):
            while (await asyncio.to_thread(server.client.get, "/load")).json() != {"server_load": 0}:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        await page.write("x" * 300)
        await page.press("Enter")
        await page.until("document.querySelectorAll('.wrong')[1]?.textContent.includes('maximum context length')")
        assert await page.evaluate("document.getElementById('text').value.length") == 300, "to be shortened and sent"


@IN_BROWSER
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_both_schemes_are_readable(tmp_path: Path, page: Page, scheme: str) -> None:
    """Contrast of 4.5 for text, as WCAG 2.2 asks (1.4.3), and 3 for the colours of the bar on its ground (1.4.11)."""
    with running_server(fake_options(tmp_path)) as server:
        await page.open(server.url)
        await page.prefer(scheme)
        names = ("ground", "surface", "ink", "quiet", "cached", "computed", "accent", "on-accent", "wrong", "mine")
        read = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim()"
        color = {name: await page.evaluate(read.format(name)) for name in names}
    assert (_luminance(color["ground"]) > 0.5) == (scheme == "light")
    for text, ground in (
        *(("ink", "ground"), ("ink", "surface"), ("ink", "mine"), ("quiet", "ground"), ("quiet", "surface")),
        *(("on-accent", "accent"), ("wrong", "ground")),
    ):
        assert _contrast(color[text], color[ground]) >= 4.5, (text, ground)
    for mark in ("cached", "computed", "accent"):
        assert _contrast(color[mark], color["ground"]) >= 3, mark


def _luminance(color: str) -> float:
    """Relative luminance of #rrggbb (WCAG 2.2)."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)
