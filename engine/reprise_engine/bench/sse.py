"""Server-sent events, fed in any pieces: https://html.spec.whatwg.org/multipage/server-sent-events.html."""

from __future__ import annotations


class EventParser:
    """Bytes in, the data of whole events out. Lines end with LF, CRLF or CR; comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> list[bytes]:
        """The data of the events that this piece completes; several data lines are joined by LF."""
        self._rest += chunk
        events: list[bytes] = []
        # A CR at the very end may be half of a CRLF: it waits for what comes next.
        held = b"\r" if self._rest.endswith(b"\r") else b""
        lines = self._rest.removesuffix(b"\r").replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        self._rest = lines.pop() + held
        for line in lines:
            if not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data = []
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
        return events
