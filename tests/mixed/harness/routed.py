"""API servers of both kinds and the example's router between them, as an operator starts them."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

from mixed_1p1d import router
from tests.mixed.harness.engines import SglangEngine, Wanted
from tests.support.ports import free_ports
from tests.vllm.harness.model import make_model
from tests.vllm.harness.servers import Server, _serve, complete
from vllm_1p1d import run as example
from vllm_1p1d.model import save_tokenizer

PORTS = (0, 1, 2, 3, 11, 12, 111, 112)
"""Distances from the router's port, as `engine_command` takes them."""
NUM_PROMPTS = 4
WITH_WORDS = {"skip-tokenizer-init": None, "served-model-name": None}


class Engines:
    """A prefill server and a decode server of the given kinds, and a router at `url`, until `stack` ends."""

    def __init__(self, kinds, folder, host, stack):
        model = make_model(folder / "models")
        if not (model / "tokenizer.json").exists():
            save_tokenizer(model)
        self.model, self._folder, self._stack = str(model), folder, stack
        self._base, self._host = free_ports(PORTS), host
        self.url = f"http://127.0.0.1:{self._base}"
        command = [sys.executable, router.__file__, "--port", str(self._base)]
        self.urls, waits = {}, []
        for number, (side, kind) in enumerate(zip(("prefill", "decode"), kinds, strict=True)):
            url, wait = (self._vllm if kind == "vllm" else self._sglang)(side, number, command)
            command += [f"--{side}", f"{kind}={url}"]
            self.urls[side] = url
            waits.append(wait)
        for wait in waits:
            wait()
        process = subprocess.Popen(command)
        stack.callback(process.wait, 10)
        stack.callback(process.terminate)
        example.wait_for(self.url + "/health", process, "router")

    def _vllm(self, side, number, command):
        arguments, environment = example.engine_command(
            side, number, model=self.model, port=self._base, policy="fail"
        )
        spec = SimpleNamespace(log=self._folder / f"{side}.log", environment=environment)
        process = Server(spec, _serve, arguments[2:])
        self._stack.callback(process.kill)
        url = f"http://127.0.0.1:{self._base + 1 + number}"
        return url, lambda: example.wait_for(url + "/health", process, side)

    def _sglang(self, side, number, command):
        engine = SglangEngine(
            self._host, Wanted(side, self.model, self._folder, {**WITH_WORDS, "page-size": 32})
        )
        self._stack.callback(engine.kill)
        if side == "prefill":
            command += ["--bootstrap-port", str(engine.bootstrap_port)]
        return f"http://127.0.0.1:{engine.port}", engine.wait_until_ready


def routed(*kinds):
    """Return a case's function: answers through the router have the tokens that vLLM's server alone gives."""

    def run(folder, outcome, host):
        with ExitStack() as stack:
            engines = Engines(kinds, Path(folder), host, stack)
            vllm = engines.urls[("prefill", "decode")[kinds.index("vllm")]]
            for seed in range(NUM_PROMPTS):
                salt = {"cache_salt": f"alone {seed}"}  # the router's request finds nothing of it
                expected = complete(vllm, engines.model, seed, **salt).tokens
                for is_streamed in (False, True):
                    found = complete(engines.url, engines.model, seed, is_streamed=is_streamed)
                    what = f"prompt {seed}{', streamed' if is_streamed else ''}"
                    outcome.compare(what, found, expected)

    return run
