"""The operator's log: one line an entry, as text or as JSON, and each line of a pass says which object it is about."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime


@dataclass(frozen=True, slots=True)
class Subject:
    """The object a line is about."""

    namespace: str
    name: str


_subject: ContextVar[Subject | None] = ContextVar("subject", default=None)

# kopf tells of every object it sees, aiohttp of every probe.
_TALKATIVE = ("kopf.objects", "aiohttp.access")


@contextlib.contextmanager
def about(namespace: str, name: str) -> Iterator[None]:
    """Lines logged inside, by whatever module and by the tasks it starts, carry the object's namespace and name."""
    token = _subject.set(Subject(namespace, name))
    try:
        yield
    finally:
        _subject.reset(token)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message; namespace and name of the object it is about, and the
    traceback, where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        subject = _subject.get()
        entry = {
            "time": datetime.fromtimestamp(record.created, tz=UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **({} if subject is None else {"namespace": subject.namespace, "name": subject.name}),
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """For people: the object before the message, unless the message begins with it."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(about)s%(message)s")

    def format(self, record: logging.LogRecord) -> str:
        subject = _subject.get()
        prefix = "" if subject is None else f"{subject.namespace}/{subject.name}: "
        record.about = "" if record.getMessage().startswith(prefix) else prefix
        return super().format(record)


def configure_logging(*, log_format: str, level: str) -> None:
    """Everything of this process goes to stderr. `log_format` is json or text, `level` debug, info, warning or error.

    A pass's lines know their object because formatting happens where the line is logged, in the pass's own context.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level != "debug":
        for name in _TALKATIVE:
            logging.getLogger(name).setLevel(logging.WARNING)
