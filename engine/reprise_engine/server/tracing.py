"""Spans of requests for an OpenTelemetry collector: `--otlp-traces-endpoint`, with the packages of the extra `otel`.

One span a request that generates, named and attributed as vLLM's (its `vllm/tracing`, after the semantic conventions
for generative AI), a child of the caller's `traceparent`. Off, nothing of OpenTelemetry is imported.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from reprise_engine.errors import ConfigError
from reprise_engine.server.generation import Generation, Generations

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_SERVICE = "reprise"
_SPAN = "llm_request"


class Tracer:
    """Spans are sent by a thread of OpenTelemetry's own; what a slow collector does not take is dropped."""

    def __init__(self, exporter: SpanExporter, *, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model = model
        resource = Resource.create({"service.name": _SERVICE})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer(__name__)

    def record(
        self, generations: Generations, *, headers: Mapping[str, str], request_id: str, path: str, status: int
    ) -> None:
        """The span of a request that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        usage = generations.usage()
        first = generations.generations[0]
        sampling = first.request.sampling
        attributes: dict[str, str | int | float] = {
            "gen_ai.request.id": request_id,
            "gen_ai.response.id": generations.batch,
            "gen_ai.response.model": self._model,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.n": len(generations.generations),
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.cached_tokens": usage.cached_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "http.route": path,
            "http.response.status_code": status,
        }
        if sampling.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        attributes |= _latencies(first)
        # Milestones are of the monotonic clock; a span wants the time of day.
        now = time.time_ns()
        started = now - int((time.monotonic() - first.request.arrival_time) * 1e9)
        span = self._tracer.start_span(
            _SPAN,
            context=TraceContextTextMapPropagator().extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=started,
        )
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(now)

    def close(self) -> None:
        """Sends what is left. Blocks for some seconds where the collector does not answer."""
        self._provider.shutdown()


def _latencies(generation: Generation) -> dict[str, float]:
    """Seconds, of the first sequence; what was not reached is left out."""
    times = generation.times
    if times is None:
        return {}
    found = {
        "gen_ai.latency.time_in_queue": times.first_scheduled,
        "gen_ai.latency.time_to_first_token": times.first_token,
        "gen_ai.latency.e2e": times.last_token,
    }
    return {name: at - times.arrival for name, at in found.items() if at is not None}


def otlp_tracer(endpoint: str, *, model: str) -> Tracer:
    """Raises ConfigError where the packages are not installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            "--otlp-traces-endpoint needs packages that are not installed; install the extra: "
            "pip install 'reprise-engine[otel]'."
        ) from error
    return Tracer(OTLPSpanExporter(endpoint=endpoint), model=model)
