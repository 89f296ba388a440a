"""What a run leaves behind: frozen records of every request, and what was around them. Times are seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Literal

ErrorKind = Literal["connect", "timeout", "disconnected", "http", "error_event", "incomplete", "protocol"]
"""connect       no connection to the server
timeout       no end within the time limit
disconnected  the connection broke while the answer was awaited or read
http          an answer with another status than 200
error_event   the stream carried an error
incomplete    the stream ended without its end being said
protocol      the answer is no stream of completions"""

CountedBy = Literal["usage", "token_ids", "chunks"]
"""Who counted the tokens: the server's usage, the ids in the stream, or, lacking both, the chunks that carried text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestError:
    """`status` is the HTTP status where there was an answer."""

    kind: ErrorKind
    message: str
    status: int | None = None

    @property
    def label(self) -> str:
        return self.kind if self.status is None or self.kind != "http" else f"http {self.status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """One request. Times are seconds since the run began.

    `chunk_times` are when events that carry tokens arrived, the first one with the first token; events that one read
    brought have one time. `prompt_tokens`, `cached_tokens` are the server's own; None where it does not tell.
    """

    index: int
    conversation: int
    turn: int
    sent_prompt_tokens: int
    """As the client counts them; a chat template or the tokenizer may add some."""
    scheduled_at: float
    """When it was due; later turns are due when the answer before is there."""
    sent_at: float
    finished_at: float
    chunk_times: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted_by: CountedBy = "usage"
    finish_reason: str | None = None
    error: RequestError | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float | None:
        """From sending to the first token."""
        return self.chunk_times[0] - self.sent_at if self.chunk_times else None

    @property
    def ttft_from_schedule(self) -> float | None:
        """From when it was due: what a user would have waited, where the client was kept from sending in time."""
        return self.chunk_times[0] - self.scheduled_at if self.chunk_times else None

    @property
    def latency(self) -> float:
        return self.finished_at - self.sent_at

    @property
    def latency_from_schedule(self) -> float:
        return self.finished_at - self.scheduled_at

    @property
    def tpot(self) -> float | None:
        """Mean time of an output token after the first."""
        if self.output_tokens < 2 or not self.chunk_times:
            return None
        return (self.chunk_times[-1] - self.chunk_times[0]) / (self.output_tokens - 1)

    @property
    def itl(self) -> tuple[float, ...]:
        """Between one chunk and the next: a chunk of several tokens counts once."""
        return tuple(later - earlier for earlier, later in zip(self.chunk_times, self.chunk_times[1:], strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLoad:
    """Whether the client kept up: how late its event loop woke (it asked every 10 ms), and its share of one core."""

    loop_lag_p99: float
    loop_lag_max: float
    cpu_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What the server says of itself; None where it does not."""

    base_url: str
    model: str
    version: str | None = None
    max_model_len: int | None = None
    prefix_caching: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCounters:
    """Differences of the server's counters over the run: all of its traffic, other clients' too."""

    query_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A whole run. `duration` is from the start to the end of the last request."""

    label: str
    workload: str
    settings: dict[str, object]
    server: ServerFacts
    started: str
    """UTC, ISO 8601."""
    duration: float
    records: tuple[RequestRecord, ...]
    client: ClientLoad
    counters: CacheCounters | None = None
    engine_flags: tuple[str, ...] | None = None
    """Of the server where the run started it itself."""
    versions: dict[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """All but the aggregates, which `statistics.summarize` computes."""
        content = asdict(self)
        for entry, record in zip(content["records"], self.records, strict=True):
            entry |= {
                "ttft": record.ttft,
                "ttft_from_schedule": record.ttft_from_schedule,
                "tpot": record.tpot,
                "latency": record.latency,
            }
        content["requests"] = content.pop("records")
        return content
