"""SGLang's registry of prefill ranks as far as its clients see it, without SGLang."""

import json
import threading
from collections import deque
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Registry:
    """It listens at once. `asked` has the paths of all questions, `rooms` the rank of each room's number. What `answer`
    returns is sent as JSON, bytes as they are. If it `hangs_up` it closes a connection after each answer, and does not
    say so.
    """

    def __init__(self, port=0):
        self.rows, self.rooms, self.asked = [], {}, []
        self.dp_size, self.follows, self.is_closed, self.hangs_up = 1, True, False, False
        registry = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _answer(self):
                if registry.is_closed:  # as if its process had ended
                    self.close_connection = True
                    return
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                url = urlsplit(self.path)
                registry.asked.append(url.path)
                query = {name: values[0] for name, values in parse_qs(url.query).items()}
                status, answer = registry.answer(self.command, url.path, query, body)
                text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)
                self.close_connection |= registry.hangs_up

            do_GET = do_PUT = do_POST = _answer

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    def answer(self, method, path, query, body):
        if path == "/register_dp_rank":
            self.rooms[body["bootstrap_room"]] = body["dp_rank"]
            return 200, "OK"
        if path == "/query_dp_ranks":
            rooms = body["bootstrap_rooms"]
            return 200, {str(room): self.rooms[room] for room in rooms if room in self.rooms}
        if method == "PUT":
            self.rows.append(body)
            self.dp_size = max(body["attn_dp_size"], body["system_dp_size"])
            self.follows = body["load_balance_method"] == "follow_bootstrap_room"
            return 200, "OK"
        expected = (
            self.rows and self.dp_size * self.rows[0]["attn_tp_size"] * self.rows[0]["pp_size"]
        )
        if not self.rows or len(self.rows) < expected:
            return 503, "not fully registered yet"
        if query["prefill_dp_rank"] == "-1":
            info = {"dp_size": self.dp_size, "follow_bootstrap_room": self.follows}
            return 200, info | {"prefill_http_port": self.rows[0].get("prefill_http_port")}
        for row in self.rows:
            if max(row["attn_dp_rank"], row["system_dp_rank"]) == int(query["prefill_dp_rank"]):
                return 200, {"rank_ip": row["rank_ip"], "rank_port": row["rank_port"]}
        return 404, "not found"

    def close(self):
        """Stop. Idempotent."""
        if self.is_closed:
            return
        self.is_closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class PrefillApi:
    """A prefill server's HTTP API. `asked` has the bodies of what it was asked. Each is answered with `status` and
    `headers` once `answers` is set, or with 401 if it has not the server's `key`. `answered`
    has the answers' statuses. `ended` counts the clients that went away before.
    """

    def __init__(self, status=200, key=None, headers=()):
        self.asked, self.answers, self.ended = deque(), threading.Event(), 0
        self.answered = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.asked.append(body)
                self.connection.settimeout(0.005)
                while not api.answers.is_set():
                    try:
                        if not self.connection.recv(1):
                            api.ended += 1
                            return
                    except TimeoutError:
                        continue
                is_refused = key and self.headers["Authorization"] != f"Bearer {key}"
                api.answered.append(401 if is_refused else status)
                self.send_response(api.answered[-1])
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b'{"text": ""}')

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    def close(self):
        """Stop."""
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
