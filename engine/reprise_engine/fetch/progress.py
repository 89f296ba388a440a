"""How far a fetch is: one line each few seconds, as a log wants it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_RATE_SECONDS = 30.0
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(kw_only=True)
class Progress:
    """Bytes of all files. `kept` were there before; the rate counts only what has come since."""

    total: int
    kept: int = 0
    clock: Callable[[], float] = time.monotonic
    done: int = field(init=False)
    _samples: deque[tuple[float, int]] = field(init=False, default_factory=deque)

    def __post_init__(self) -> None:
        self.done = self.kept
        self._samples.append((self.clock(), self.done))

    def add(self, count: int) -> None:
        """`count` bytes have come; negative, where a file begins anew."""
        self.done += count

    def rate(self) -> float:
        """Bytes a second, over the last half minute."""
        now = self.clock()
        self._samples.append((now, self.done))
        while len(self._samples) > 2 and self._samples[1][0] <= now - _RATE_SECONDS:
            self._samples.popleft()
        began, done = self._samples[0]
        return max(0.0, self.done - done) / max(now - began, 1e-9)

    def line(self) -> str:
        """For the log: `3.1 of 15.3 GiB (20%), 180.2 MiB/s, about 1m10s left`."""
        rate = self.rate()
        text = f"{amount(self.done)} of {amount(self.total)} ({_percent(self.done, self.total)}%), {amount(rate)}/s"
        if rate > 0 and self.done < self.total:
            text += f", about {duration((self.total - self.done) / rate)} left"
        return text


def amount(count: float) -> str:
    """Bytes in the unit that reads best."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count, power = count / 1024, power + 1
    return f"{count:.0f} {_UNITS[power]}" if power == 0 else f"{count:.1f} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """Such as 12s, 3m05s, 2h10m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def _percent(done: int, total: int) -> int:
    """Rounded down: 100 means all of it."""
    return 100 if total == 0 else done * 100 // total
