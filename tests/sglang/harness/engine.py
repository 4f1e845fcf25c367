"""SGLang servers, forked from this process after it has imported SGLang, so that one starts in four seconds, not sixty.

Each `Engine` is a fork that runs SGLang's own `run_server`, with a free port and a log of its own. Processes that it
spawns are forked too. Requests use HTTP without threads: `submit` sends one, `answer` waits for it.
"""

import http.client
import importlib
import json
import multiprocessing
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.sglang.harness.device import CPU, Device
from tests.support.engine_process import EngineProcess
from tests.support.ports import free_ports
from tests.vllm.harness.report import NoAnswerError

START_TIMEOUT_S = 180.0
ANSWER_TIMEOUT_S = 120.0  # of which the first compilation of a decode step may take most
POLL_S = 0.1
HEALTH_S = 5.0  # its health check computes a token, and looks for it a second later
IDLE_S = 0.002
OK = 200
MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.models.registry",
    "sglang.srt.disaggregation.prefill",
    "sglang.srt.disaggregation.decode",
    "tests.sglang.harness.dump",
)
OPTIONS = {
    "dtype": "float32",
    "max-total-tokens": 8192,
    "max-running-requests": 4,
    "page-size": 16,
    "chunked-prefill-size": 64,
    "mem-fraction-static": 0.3,
    "grammar-backend": "none",
    "skip-server-warmup": True,
    "skip-tokenizer-init": True,
    "host": "127.0.0.1",
    "served-model-name": "small",
}


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine's options. `options`: of `sglang.launch_server`, by name, beyond `OPTIONS` and those of its `device`,
    where None leaves one out; `dumps`: the folder for the digests of its cache; `nodes`: the `Nodes` that it
    runs on, if they are not this machine.
    """

    model: str
    log: Path
    dumps: Path
    options: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    device: Device = CPU
    nodes: Any = None

    @property
    def arguments(self):
        """Return the command line."""
        flags, common = [], {"model-path": self.model, **OPTIONS, **self.device.options}
        for name, value in (common | self.options).items():
            if value is not None:
                flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return flags


@dataclass(frozen=True)
class Answer:
    """The answer to one request. `error`: SGLang's message, "" if there is none."""

    tokens: list
    error: str = ""
    reason = "length"


class Request:
    """A request in progress: POST, or GET without a body."""

    def __init__(self, port, path, body=None, headers=(), address="127.0.0.1"):
        self._connection = http.client.HTTPConnection(address, port, timeout=ANSWER_TIMEOUT_S)
        method, payload = ("GET", None) if body is None else ("POST", json.dumps(body))
        try:
            headers = {"Content-Type": "application/json", **dict(headers)}
            self._connection.request(method, path, payload, headers)
        except OSError as error:
            raise NoAnswerError(f"the engine is gone: {error}") from error

    def answer(self):
        """Wait for the answer.

        Raises:
            NoAnswerError: The engine is gone, or took longer than `ANSWER_TIMEOUT_S`.
        """
        status, text = self._response(ANSWER_TIMEOUT_S)
        if status != OK:
            return Answer([], text or str(status))
        content = json.loads(text)
        reason = content["meta_info"]["finish_reason"] or {}
        error = reason.get("message", "aborted") if reason.get("type") == "abort" else ""
        return Answer(content.get("output_ids") or [], error)

    def arrivals(self):
        """Yield the time at which each part of a streamed answer came."""
        with closing(self._connection) as connection:
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    yield time.monotonic()

    def status(self, timeout_s=ANSWER_TIMEOUT_S):
        """Wait for the HTTP status only."""
        return self._response(timeout_s)[0]

    def text(self):
        """Wait for the answer's text. Raises NoAnswerError: its status is not 200, or there is none."""
        status, text = self._response(ANSWER_TIMEOUT_S)
        if status != OK:
            raise NoAnswerError(f"status {status}: {text[:200]}")
        return text

    def _response(self, timeout_s):
        with closing(self._connection) as connection:
            connection.sock.settimeout(timeout_s)
            try:
                response = connection.getresponse()
                return response.status, response.read().decode()
            except (OSError, http.client.HTTPException) as error:
                raise NoAnswerError(f"no answer: {error or type(error).__name__}") from error


class Engine(EngineProcess):
    """The parent's end of a forked server."""

    address = "127.0.0.1"

    def __init__(self, spec, port=None):
        self.spec = spec
        self.port = port or free_ports()
        arguments = [*spec.arguments, "--port", str(self.port)]
        super().__init__(spec, run_engine, arguments, spec.dumps, spec.device.kind)

    def wait_until_ready(self):
        """Wait until the engine answers.

        Raises:
            NoAnswerError: The engine ended, or took longer than `START_TIMEOUT_S`.
        """
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self.has_ended:
                raise NoAnswerError(f"the engine ended at its start: {self.last_error()}")
            with suppress(NoAnswerError):
                if self.request("/health", None).status(HEALTH_S) == OK:
                    return
            time.sleep(POLL_S)
        raise NoAnswerError("the engine did not start in time")

    def request(self, path, body, headers=()):
        """Send a request, with the engine's key if its API needs one: GET if `body` is None. Returns the `Request`."""
        key = self.spec.options.get("api-key")
        keyed = {"Authorization": f"Bearer {key}"} if key else {}
        return Request(self.port, path, body, {**keyed, **dict(headers)}, self.address)

    def submit(self, prompt, *, max_tokens=8, headers=(), **options):
        """Request the greedy tokens after `prompt`. Returns the `Request`."""
        sampling = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": sampling, **options}
        return self.request("/generate", body, headers)

    def ask(self, prompt, **options):
        """Ask only this engine."""
        return self.submit(prompt, **options).answer()

    def abort(self, request_id):
        """Abort a request, as a client's disconnect does."""
        self.request("/abort_request", {"rid": request_id}).status()

    def post(self, path, body):
        """Send an order to the engine. Raises NoAnswerError: it was refused, or the engine is gone."""
        status = self.request(path, body).status()
        if status != OK:
            raise NoAnswerError(f"{path}: status {status}")

    def is_idle(self):
        """Empty the prefix cache. Returns False while requests hold any of the cache."""
        return self.request("/flush_cache", {}).status() == OK

    def log_text(self):
        """Return its log so far."""
        return self.spec.log.read_text(errors="replace") if self.spec.log.exists() else ""

    def last_error(self):
        """Return the log's last line that names an error."""
        lines = [line for line in self.log_text().splitlines() if "Error" in line]
        return lines[-1] if lines else "see its log"


def preload(device=CPU):
    """Import what every engine needs, once."""
    device.prepare()
    for name in MODULES:
        importlib.import_module(name)
    if device.kind == "cuda" and importlib.import_module("torch").cuda.is_initialized():
        raise RuntimeError("importing SGLang has used CUDA: engines forked from here cannot")


def run_engine(arguments, dumps, kind):
    """Run a server in this process."""
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    from tests.sglang.harness.dump import dump_into
    from tests.sglang.harness.faults import fail_in_stages
    from tests.sglang.harness.kernels import stand_in
    from tests.sglang.harness.sparse import has_indexer, stand_in_for_sparse

    set_method = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda method, force=False: set_method("fork", force=True)
    dump_into(dumps)
    fail_in_stages()
    stand_in(kind)
    if has_indexer(arguments[arguments.index("--model-path") + 1]):
        stand_in_for_sparse()
    rest_when_idle()
    if "nixl" in arguments and kind == "cpu":
        use_host_memory()
    load_plugins()
    run_server(prepare_server_args(arguments))


def rest_when_idle():
    """Let SGLang's scheduler, which polls without a pause when idle, leave the cores to other processes."""
    from sglang.srt.managers.scheduler import Scheduler

    on_idle = Scheduler.on_idle

    def rest(scheduler):
        on_idle(scheduler)
        time.sleep(IDLE_S)

    Scheduler.on_idle = rest


def use_host_memory():
    """Let SGLang's NIXL backend, which registers every cache as GPU memory, register host memory."""
    from nixl._api import nixl_agent

    def on_host(original):
        def call(*arguments, **options):
            arguments = [
                "DRAM" if isinstance(each, str) and each == "VRAM" else each for each in arguments
            ]
            return original(*arguments, **options)

        return call

    for name in ("register_memory", "get_reg_descs", "get_xfer_descs", "prep_xfer_dlist"):
        setattr(nixl_agent, name, on_host(getattr(nixl_agent, name)))
