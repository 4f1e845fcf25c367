"""Where engines send OpenTelemetry spans: a server that keeps them."""

import importlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SERVICE = "opentelemetry.proto.collector.trace.v1.trace_service_pb2"


class SpanServer:
    """Takes spans by OTLP over HTTP. `found` has each one's name, trace in hexadecimal digits, and attributes."""

    def __init__(self):
        service = importlib.import_module(SERVICE)  # installed beside SGLang only
        self.found = []
        found = self.found

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = service.ExportTraceServiceRequest.FromString(body)
                for scope in (each for of in request.resource_spans for each in of.scope_spans):
                    found.extend(
                        (
                            span.name,
                            span.trace_id.hex(),
                            {each.key: each.value.string_value for each in span.attributes},
                        )
                        for span in scope.spans
                    )
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        """Stop."""
        self._server.shutdown()
        self._server.server_close()
