"""OpenTelemetry spans of transfers, through the process's tracer provider. Without a provider they cost nothing.

Each transfer of a worker becomes a span `kvconnector.load` or `kvconnector.hold`, with a child span for each phase of
its `session.RequestTrace`. Needs the extra `tracing`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvconnector._version import __version__
from kvconnector.session import RequestTrace

_NS_PER_S = 1_000_000_000
MAX_REQUESTS = 10_000
_GOOD = frozenset({"done", "released"})


def headers_of(context: object) -> dict[str, str]:
    """Return the trace headers of an OpenTelemetry context; none if it is something else, or has no span."""
    headers: dict[str, str] = {}
    if isinstance(context, Context):
        TraceContextTextMapPropagator().inject(headers, context)
    return headers


class RequestSpans:
    """Exports spans of one engine's transfers, as children of the spans in its requests' trace headers."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._tracer = trace.get_tracer("kvconnector", __version__)
        self._headers: dict[str, Mapping[str, str]] = {}

    def on_new_request(self, request_id: str, headers: Mapping[str, str] | None) -> None:
        """Keep a queued request's headers, which may have a W3C `traceparent`, for the last `MAX_REQUESTS` requests."""
        if headers:
            self._headers[request_id] = headers
            if len(self._headers) > MAX_REQUESTS:
                del self._headers[next(iter(self._headers))]

    def export(self, traces: Sequence[RequestTrace]) -> None:
        """Export spans of transfers that have ended, on any of the engine's workers."""
        for each in traces:
            self._export(each)

    def _export(self, done: RequestTrace) -> None:
        headers = self._headers.get(done.request_id, {})
        root = self._tracer.start_span(
            f"kvconnector.{done.kind}",
            context=TraceContextTextMapPropagator().extract(headers),
            start_time=round(min(phase.start_s for phase in done.phases) * _NS_PER_S),
            attributes={
                "kvconnector.engine": self._engine_id,
                "kvconnector.request": done.request_id,
                "kvconnector.peer": done.peer,
                "kvconnector.bytes": done.nbytes,
                "kvconnector.path": done.path,
                "kvconnector.outcome": done.outcome,
            },
        )
        in_root = trace.set_span_in_context(root)
        for phase in done.phases:
            child = self._tracer.start_span(
                f"kvconnector.{phase.name}",
                context=in_root,
                start_time=round(phase.start_s * _NS_PER_S),
            )
            child.end(round(phase.end_s * _NS_PER_S))
        if done.outcome not in _GOOD:
            root.set_status(StatusCode.ERROR, done.outcome)
        root.end(round(max(phase.end_s for phase in done.phases) * _NS_PER_S))
