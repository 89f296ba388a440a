"""The log: one line an entry, and each line of a pass names its object."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from reprise_operator.cluster import Key
from reprise_operator.logs import JsonFormatter, TextFormatter, about
from reprise_operator.process import about_key
from reprise_operator.workqueue import Retry, WorkQueue


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged below `reprise_operator`, as JSON."""
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger("reprise_operator")
    before = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    yield out
    root.removeHandler(handler)
    root.setLevel(before)


def entries(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_line_is_one_json_object() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("a.b", logging.ERROR, __file__, 1, "it %s", ("broke",), sys.exc_info())
    line = JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "a.b", "it broke")
    assert "ValueError: two\nlines" in entry["exception"]
    assert entry["time"].endswith("+00:00")
    assert "namespace" not in entry


def test_a_line_for_people_names_the_object_once() -> None:
    def line(message: str) -> str:
        return TextFormatter().format(logging.LogRecord("a", logging.INFO, __file__, 1, message, (), None))

    assert line("hello").endswith("a: hello")
    with about("llm", "qwen"):
        assert line("hello").endswith("a: llm/qwen: hello")
        assert line("llm/qwen: hello").endswith("a: llm/qwen: hello")
    assert line("hello").endswith("a: hello")


async def test_every_line_of_a_pass_names_its_object_also_when_passes_overlap(lines: io.StringIO) -> None:
    logger = logging.getLogger("reprise_operator.somewhere")
    done = asyncio.Event()

    async def deep(text: str) -> None:
        await asyncio.sleep(0)
        logger.info(text)

    async def handler(key: Key) -> float | None:
        logger.info("begins")
        await asyncio.gather(deep("in a task of its own"), deep("and in another"))
        if key.name == "a":
            raise Retry("conflict", after=60.0)
        if key.name == "b":
            done.set()
            raise ValueError("a bug")
        return None

    queue: WorkQueue[Key] = WorkQueue(handler=handler, context=about_key)
    running = asyncio.create_task(queue.run())
    for name in "abc":
        queue.add(Key("llm", name))
    await asyncio.wait_for(done.wait(), 5)
    for _ in range(500):
        await asyncio.sleep(0.01)
        if len(entries(lines)) >= 11:
            break
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    found = entries(lines)
    assert {entry.get("namespace") for entry in found} == {"llm"}
    told = {name: sorted(entry["message"] for entry in found if entry["name"] == name) for name in "abc"}
    three = ["and in another", "begins", "in a task of its own"]
    assert told["c"] == three
    assert told["a"] == [*three, "llm/a: conflict; try 2 follows"]
    assert told["b"] == [*three, "llm/b: reconcile failed"]
