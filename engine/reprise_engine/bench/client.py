"""One request to an OpenAI-compatible server, its stream read and timed. No extension is needed; those that help are
used where the first, small request shows that the server has them.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, Self

import aiohttp

from reprise_engine.bench.result import CacheCounters, CountedBy, ErrorKind, RequestError, ServerFacts
from reprise_engine.bench.sse import EventParser
from reprise_engine.bench.text import PromptText
from reprise_engine.errors import ConfigError

Api = Literal["completions", "chat"]

_PROBE_TOKENS = 8
_CONNECT_SECONDS = 10.0
_SHORT_SECONDS = 30.0
_COUNTERS = ("vllm:prefix_cache_queries", "vllm:prefix_cache_hits")
_MESSAGE_LIMIT = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How requests are made. `text` makes prompts of text; without it they are token ids."""

    api: Api = "completions"
    text: PromptText | None = None
    api_key: str | None = field(default=None, repr=False)
    temperature: float = 0.0
    ignore_eos: bool = True
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 3600.0
    """Seconds a request may take."""

    def __post_init__(self) -> None:
        if self.api == "chat" and self.text is None:
            raise ConfigError("Chat completions take text, so prompts need a tokenizer; give --tokenizer.")


@dataclass(slots=True)
class Answer:
    """What came back, filled while it is read: an error keeps what was there. Times are of `time.perf_counter`."""

    sent_at: float
    finished_at: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int = 0
    counted_by: CountedBy = "chunks"
    finish_reason: str | None = None
    error: RequestError | None = None


class Failed(Exception):
    """Inside this module: ends the reading of an answer."""

    def __init__(self, kind: ErrorKind, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.error = RequestError(kind=kind, message=message[:_MESSAGE_LIMIT], status=status)


class Client:
    """An open client of one server. `connect` comes first: it finds out the model, and what the server can do."""

    def __init__(self, base_url: str, model: str | None = None, options: ClientOptions | None = None) -> None:
        self.base_url = server_root(base_url)
        self.options = options or ClientOptions()
        self._model = model
        self._returns_token_ids = False
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        headers = {"Authorization": f"Bearer {self.options.api_key}"} if self.options.api_key else {}
        self._session = aiohttp.ClientSession(
            headers=headers,
            # As many connections as there are requests under way: the client must not queue them. A new one for each:
            # llama.cpp closes one behind a stream without saying so, and a POST is not tried again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self.options.timeout, sock_connect=_CONNECT_SECONDS),
            read_bufsize=2**18,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
            # Sockets are closed in the loop's next round, and it may be the last one (aiohttp, "Graceful shutdown").
            await asyncio.sleep(0)

    @property
    def session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used outside of its `async with`"
        return self._session

    @property
    def returns_token_ids(self) -> bool:
        return self._returns_token_ids

    # --- around the requests

    async def connect(self, *, probe_token_id: int) -> ServerFacts:
        """Raises ConfigError where there is no server, or none that takes such prompts."""
        try:
            async with self.session.get(f"{self.base_url}/v1/models", timeout=_short()) as response:
                content = await _json(response)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ConfigError(
                f"--base-url is {self.base_url}, where no OpenAI-compatible server answers: {_words(error)}. "
                "Start one, or let --model without --base-url do so."
            ) from error
        if response.status != 200:
            raise ConfigError(
                f"--base-url is {self.base_url}, whose /v1/models answers with HTTP {response.status}: "
                f"{_complaint(content)}. An API key is read from the environment (OPENAI_API_KEY, REPRISE_API_KEY)."
            )
        cards = content.get("data") if isinstance(content, dict) else None
        if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
            raise ConfigError(f"--base-url is {self.base_url}, whose /v1/models has no list of models.")
        if self._model is None:
            if not cards:
                raise ConfigError(f"{self.base_url} names no model; give --model.")
            self._model = str(cards[0].get("id"))
        card: dict[str, Any] = next((card for card in cards if card.get("id") == self._model), {})
        length = card.get("max_model_len")
        await self._probe((probe_token_id,) * _PROBE_TOKENS)
        return ServerFacts(
            base_url=self.base_url,
            model=self._model,
            version=await self._version(),
            max_model_len=length if isinstance(length, int) else None,
            prefix_caching=await self._prefix_caching(),
        )

    async def _probe(self, token_ids: tuple[int, ...]) -> None:
        """Sends a small request, at first with everything wanted, then with what every server must take."""
        wanted = self.options.text is None
        answer = None
        for asks_ids in (True, False) if wanted else (False,):
            self._returns_token_ids = asks_ids
            answer = await self.complete(self.body(token_ids, output_tokens=2))
            if answer.error is None:
                # A server may ignore the field instead of refusing it.
                self._returns_token_ids = asks_ids and bool(answer.token_ids)
                break
        assert answer is not None
        if answer.error is not None:
            kind = "text" if self.options.text else "token ids"
            raise ConfigError(
                f"{self.base_url} refuses a small request with {kind} for a prompt ({answer.error.label}: "
                f"{answer.error.message}). A server that takes no token ids, or has another vocabulary, needs "
                "--tokenizer FOLDER (and --prompt-format text)."
            )
        if wanted and answer.prompt_tokens not in (None, len(token_ids)):
            raise ConfigError(
                f"{self.base_url} counts {answer.prompt_tokens} tokens in a prompt of {len(token_ids)} token ids: it "
                "does not take them as ids. Use --prompt-format text with --tokenizer FOLDER."
            )

    async def _version(self) -> str | None:
        content = await self._get_json("/version")
        return str(content["version"]) if isinstance(content, dict) and "version" in content else None

    async def _prefix_caching(self) -> bool | None:
        """vLLM's information series, which ours has too."""
        match = re.search(r'cache_config_info\{[^}]*enable_prefix_caching="(\w+)"', await self._metrics() or "")
        return None if match is None else match[1] == "True"

    async def reset_prefix_cache(self) -> None:
        """Raises ConfigError where the server cannot."""
        async with self.session.post(f"{self.base_url}/reset_prefix_cache", timeout=_short()) as response:
            if response.status != 200:
                raise ConfigError(
                    f"--reset-prefix-cache: POST {self.base_url}/reset_prefix_cache answers with HTTP "
                    f"{response.status}; leave the flag out for this server."
                )

    async def counters(self) -> CacheCounters | None:
        """The server's totals, where it has vLLM's."""
        text = await self._metrics()
        totals = [read_counter(text or "", name) for name in _COUNTERS]
        if totals[0] is None or totals[1] is None:
            return None
        return CacheCounters(query_tokens=totals[0], hit_tokens=totals[1])

    async def _metrics(self) -> str | None:
        try:
            async with self.session.get(f"{self.base_url}/metrics", timeout=_short()) as response:
                return await response.text() if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError):
            return None

    async def _get_json(self, path: str) -> object:
        try:
            async with self.session.get(f"{self.base_url}{path}", timeout=_short()) as response:
                return await _json(response) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return None

    # --- a request

    def body(self, prompt: Sequence[int] | str | list[dict[str, str]], *, output_tokens: int) -> bytes:
        """The body of a request, made before its time is taken. Token ids become text where prompts are text."""
        options = self.options
        content: dict[str, Any] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": output_tokens,
            "temperature": options.temperature,
        }
        if options.ignore_eos:
            content["ignore_eos"] = True
        if self._returns_token_ids:
            content["return_token_ids"] = True
        if not isinstance(prompt, str | list):
            prompt = list(prompt) if options.text is None else options.text.decode(prompt)
        if options.api == "chat":
            content["messages"] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        else:
            content["prompt"] = prompt
        return json.dumps(content | dict(options.extra_body)).encode()

    async def complete(self, body: bytes, answer: Answer | None = None) -> Answer:
        """Never raises for what a server or a network does: that is in `Answer.error`.

        `answer` is the one to fill, for a caller that looks on while it is read.
        """
        path = "/v1/chat/completions" if self.options.api == "chat" else "/v1/completions"
        answer = answer or Answer(sent_at=0.0)
        answer.sent_at = time.perf_counter()
        try:
            async with self.session.post(
                self.base_url + path, data=body, headers={"Content-Type": "application/json"}
            ) as response:
                if response.status != 200:
                    content = await response.text(errors="replace")
                    raise Failed("http", _complaint(content), response.status)
                await _read_stream(response, answer)
        except Failed as failed:
            answer.error = failed.error
        except aiohttp.ClientConnectorError as error:
            answer.error = RequestError(kind="connect", message=_words(error))
        except (TimeoutError, aiohttp.ServerTimeoutError) as error:
            answer.error = RequestError(kind="timeout", message=_words(error))
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            answer.error = RequestError(kind="disconnected", message=_words(error))
        except aiohttp.ClientError as error:
            answer.error = RequestError(kind="protocol", message=_words(error))
        answer.finished_at = time.perf_counter()
        return answer


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    if not response.content_type.startswith("text/event-stream"):
        raise Failed("protocol", f"the answer is {response.content_type}, not a stream of events")
    parser = EventParser()
    done = False
    async for piece in response.content.iter_any():
        now = time.perf_counter()
        for data in parser.feed(piece):
            if data.strip() == b"[DONE]":
                done = True
            else:
                take_event(answer, data, now)
    if not done and answer.finish_reason is None:
        raise Failed("incomplete", "the stream ended without a finish_reason and without [DONE]")


def take_event(answer: Answer, data: bytes, now: float) -> None:
    """Takes in one event of the stream that arrived at `now`. Raises Failed."""
    try:
        event = json.loads(data)
    except ValueError:
        raise Failed("protocol", f"an event is no JSON: {data[:80]!r}") from None
    if not isinstance(event, dict):
        raise Failed("protocol", f"an event is no JSON object: {data[:80]!r}")
    if event.get("error"):
        raise Failed("error_event", _complaint(event))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
        token_ids = choice.get("token_ids") or ()
        if text or token_ids:
            answer.chunk_times.append(now)
            answer.token_ids += token_ids
            if text:
                answer.text.append(text)
            if answer.counted_by != "usage":
                answer.counted_by = "token_ids" if token_ids else "chunks"
                answer.output_tokens += len(token_ids) or 1
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    usage = event.get("usage")
    if isinstance(usage, dict) and isinstance(usage.get("completion_tokens"), int):
        answer.output_tokens, answer.counted_by = usage["completion_tokens"], "usage"
        answer.prompt_tokens = usage.get("prompt_tokens")
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    timings = event.get("timings")  # llama.cpp's, for versions whose usage has no details
    if answer.cached_tokens is None and isinstance(timings, dict) and isinstance(timings.get("cache_n"), int):
        answer.cached_tokens = timings["cache_n"]


def server_root(url: str) -> str:
    """Without a trailing /v1, with which OpenAI's clients name a server. Raises ConfigError."""
    root = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    if not re.match(r"https?://[^/\s]+", root):
        raise ConfigError(f"--base-url is {url!r}; it must be a URL such as http://127.0.0.1:8000.")
    return root


def read_counter(exposition: str, name: str) -> int | None:
    """The sum over all labels of a counter in Prometheus' text format; None where it is not there."""
    found = re.findall(rf"^{re.escape(name)}(?:_total)?(?:\{{.*\}})?\s+(\S+)\s*$", exposition, re.MULTILINE)
    return round(sum(map(float, found))) if found else None


def counted(before: CacheCounters | None, after: CacheCounters | None) -> CacheCounters | None:
    """The difference; None where the server has none, or was started anew in between."""
    if before is None or after is None or after.query_tokens < before.query_tokens:
        return None
    return replace(
        after,
        query_tokens=after.query_tokens - before.query_tokens,
        hit_tokens=after.hit_tokens - before.hit_tokens,
    )


async def wait_ready(base_url: str, *, seconds: float) -> bool:
    """Whether /v1/models answered within this time; any answer but 503 counts."""
    deadline = time.monotonic() + seconds
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:
        while True:
            try:
                async with session.get(f"{base_url}/v1/models") as response:
                    if response.status != 503:
                        return True
            except (aiohttp.ClientError, TimeoutError):
                pass
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.1)


def _short() -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=_SHORT_SECONDS, sock_connect=_CONNECT_SECONDS)


async def _json(response: aiohttp.ClientResponse) -> object:
    return json.loads(await response.text())


def _complaint(content: object) -> str:
    """The message in OpenAI's, FastAPI's or no known shape of an error."""
    if isinstance(content, str):
        try:
            content = json.loads(content)
        except ValueError:
            return " ".join(str(content).split())[:_MESSAGE_LIMIT] or "no message"
    if isinstance(content, dict):
        error = content.get("error", content.get("detail", content))
        if isinstance(error, dict):
            error = error.get("message", error)
        content = error
    return " ".join(str(content).split())[:_MESSAGE_LIMIT]


def _words(error: BaseException) -> str:
    return str(error) or type(error).__name__
