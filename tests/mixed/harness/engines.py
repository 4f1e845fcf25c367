"""Engines of three kinds behind one interface: vLLM's are forked here, SGLang's in a process of its environment."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kvconnector.integrations.sglang.transfers import transfer_names
from tests.sglang.harness.dump import merged_dumps
from tests.sglang.harness.engine import ANSWER_TIMEOUT_S, OK, Answer, Request
from tests.sglang.harness.engine import Engine as Server
from tests.sglang.harness.engine import EngineSpec as ServerSpec
from tests.sglang.harness.pair import threads_of
from tests.support.ports import free_ports
from tests.vllm.harness.device import Device
from tests.vllm.harness.digests import merged
from tests.vllm.harness.engine import Engine as InProcess
from tests.vllm.harness.engine import EngineSpec, run_steps
from tests.vllm.harness.report import NoAnswerError, becomes
from vllm_1p1d.router import REMOTE_DECODE

MODEL_NAME = "minillm-llama-seed0"
"""What all engines of a case call their model: minillm has no other name for it."""
PYTHON = "KVC_SGLANG_PYTHON"
"""The variable that names the interpreter of SGLang's environment."""
OURS = {"disaggregation-transfer-backend": "kvconnector", "served-model-name": MODEL_NAME}
OF_SGLANG = {
    "prefill": {**OURS, "disaggregation-mode": "prefill"},
    "decode": {
        **OURS,
        "disaggregation-mode": "decode",
        "disaggregation-decode-retraction-backup": "cpu_tensor",
    },
    "alone": {},
}
"""Options of each side's engine."""
START_TIMEOUT_S = 120.0
CPU = Device("cpu")
OF_MINILLM = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
}
"""The fields of minillm's configuration, by those of a Llama's."""


@dataclass(frozen=True)
class Names:
    """What a router draws for one transfer: a room, and the name and the secret that follow from it."""

    room: int

    @property
    def params(self):
        """Return them as vLLM takes them."""
        name, secret = transfer_names(self.room)
        return {"transfer_id": name, "transfer_secret": secret}


class SglangHost:
    """The process in SGLang's environment, until `close`. Its engines are on `device`."""

    def __init__(self, device=CPU):
        command = [os.environ[PYTHON], "-m", "tests.mixed.harness.sglang_host", device.kind]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._is_ready = False

    def order(self, **order):
        """Give it an order, and return the answer."""
        if not self._is_ready:
            self._answer()
            self._is_ready = True
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise NoAnswerError("the process in SGLang's environment has ended; see above")
        return json.loads(line)

    def close(self):
        """End it, and its servers."""
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


@dataclass(frozen=True)
class Wanted:
    """An engine to start: its `side` ("prefill", "decode" or "alone"), its model, a folder for its log, and options."""

    side: str
    model: str
    folder: Path
    options: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    device: Device = CPU

    @property
    def log(self):
        return self.folder / f"{self.side}.log"


class SglangEngine(Server):
    """A server of SGLang, which `host` forks."""

    answers_before_it_is_read = False
    """Its prefill engine answers when a decode engine has read the prompt."""

    def __init__(self, host, wanted):
        self._host, self._name = host, f"{wanted.folder.name}-{wanted.side}"
        self._rids = {}
        self.bootstrap_port = free_ports(range(4))
        options = dict(OF_SGLANG[wanted.side])
        if wanted.side == "prefill":
            options["disaggregation-bootstrap-port"] = self.bootstrap_port
        options |= wanted.options
        own = {**threads_of(int(options.get("tp", 1))), **wanted.environment}
        arguments = {"model": wanted.model, "options": options, "environment": own}
        self.spec = ServerSpec(log=wanted.log, dumps=wanted.folder, **arguments)
        arguments |= {"log": str(wanted.log), "dumps": str(wanted.folder)}
        self.port = host.order(start=self._name, arguments=arguments)["port"]

    @property
    def has_ended(self):
        return self._host.order(has_ended=self._name)["has_ended"]

    def kill(self):
        self._host.order(kill=self._name)

    def pause(self):
        self._host.order(pause=self._name)

    stop = kill

    def begin_prefill(self, prompt, names):
        """Have a prompt computed for the transfer with these names. Returns the request."""
        return self._named(prompt, names.room, **self.where)

    def _named(self, prompt, room, **options):
        request = self.submit(prompt, rid=str(room), bootstrap_room=room, **options)
        self._rids[request] = str(room)
        return request

    def cancel(self, request):
        """End a request early, as a client does that leaves."""
        self.abort(self._rids[request])

    def is_without_answer(self, request):
        """Return True if a request was cancelled before its answer, and gets none."""
        return False

    @property
    def where(self):
        return {"bootstrap_host": "127.0.0.1", "bootstrap_port": self.bootstrap_port}

    @property
    def remote(self):
        """Return where its directory service is, as vLLM's decode engine takes it."""
        return {
            "remote_engine_id": f"sglang-prefill-{self.bootstrap_port}",
            "remote_host": "127.0.0.1",
            "remote_port": self.bootstrap_port + 1,
            "remote_public_key": "",
        }

    def begin_decode(self, prompt, names, prefill, **options):
        """Ask for the tokens after a prompt that `prefill` computes. Returns the request."""
        return self._named(prompt, names.room, **prefill.where, **options)

    def result(self, request):
        """Wait for a request's answer."""
        self._rids.pop(request, None)
        return request.answer()

    def digests(self, room, answer, num_tokens):
        """Return digests of what its cache has of a prompt, by layer and head."""
        side = self.spec.options["disaggregation-mode"]
        return by_layer(merged_dumps(self.spec.dumps, room, side))

    def check_idle(self):
        """Return what the engine still holds, "" if it is nothing."""
        return "" if becomes(self.is_idle, 30.0) else "it still holds requests"


class VllmEngine(InProcess):
    """An engine of vLLM, which a pipe asks."""

    answers_before_it_is_read = True

    def __init__(self, wanted):
        self.engine_id = f"vllm-{wanted.side}"
        self._port, self._cancelled = free_ports(), set()
        transfer = {
            "kv_connector": "KVConnector",
            "kv_connector_module_path": "kvconnector.integrations.vllm",
            "kv_role": "kv_producer" if wanted.side == "prefill" else "kv_consumer",
            "kv_load_failure_policy": "fail",
            "engine_id": self.engine_id,
            "kv_connector_extra_config": {"model_name": MODEL_NAME},
        }
        ranks = wanted.options.get("tp_size", 1)
        own = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._port),
            **wanted.device.environment(0, ranks),
            **wanted.environment,
        }
        self._log = wanted.log
        common = {"model": wanted.model, "transfer": transfer, "log": wanted.log}
        common["arguments"] = wanted.device.arguments(is_pipeline=False)
        spec = EngineSpec(**common, environment=own, **wanted.options)
        super().__init__(spec, run_steps)

    def begin_prefill(self, prompt, names):
        """Have a prompt computed for the transfer with these names. Returns the request."""
        return self.submit(prompt, {**REMOTE_DECODE, **names.params}, max_tokens=1)

    @property
    def where(self):
        """Return where its directory service is, as SGLang's decode engine takes it."""
        return {"bootstrap_host": f"{self.engine_id}@127.0.0.1", "bootstrap_port": self._port}

    @property
    def remote(self):
        """Return the same as minillm's decode engine takes it."""
        return {
            "remote_engine_id": self.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": self._port,
            "remote_public_key": "",
        }

    def begin_decode(self, prompt, names, prefill, **options):
        """Ask for the tokens after a prompt that `prefill` computes. Returns the request."""
        params = {"do_remote_prefill": True, **prefill.remote, **names.params}
        return self.submit(prompt, params, **options)

    def log_text(self):
        """Return its log so far."""
        return self._log.read_text(errors="replace")

    def cancel(self, request):
        """End a request early, as a client does that leaves."""
        self.call("abort", request)
        self._cancelled.add(request)

    def is_without_answer(self, request):
        """Return True if a request was cancelled before its answer, and gets none."""
        return request in self._cancelled and request not in self._answers

    def result(self, request):
        """Wait for a request's answer."""
        return self.answer(request)

    def digests(self, room, answer, num_tokens):
        """Return digests of what its cache has of a prompt, by layer and head."""
        return by_layer(merged(self.call("digests", answer.block_ids, 0, num_tokens)))

    def check_idle(self):
        """Return what the engine still holds, "" if it is nothing."""
        becomes(lambda: not self.call("report")["requests"], 30.0)
        report = self.call("report")
        held = {name: report[name] for name in ("requests", "used_blocks") if report[name]}
        return f"it still holds {held}" if held else ""


class MinillmEngine:
    """A server of minillm, which reads the same weights."""

    answers_before_it_is_read = True

    def __init__(self, wanted):
        self.engine_id, self.port, self._port = f"minillm-{wanted.side}", free_ports(), free_ports()
        self._log = wanted.log
        described = json.loads(Path(wanted.model, "config.json").read_text())
        config = wanted.folder / f"{wanted.side}.json"
        config.write_text(
            json.dumps(
                {
                    **{ours: described[theirs] for ours, theirs in OF_MINILLM.items()},
                    "weights": str(Path(wanted.model, "model.safetensors")),
                }
            )
        )
        control = {"host": "127.0.0.1", "insecure": True, "port": self._port}
        shape = ",".join(f"{name}={value}" for name, value in wanted.options.items())
        command = [sys.executable, "-m", f"minillm.{wanted.side}_server", "--engine-id"]
        command += [self.engine_id, "--port", str(self.port), "--log-dir", str(wanted.folder)]
        command += ["--model-config", str(config), "--engine", shape, "--failure-policy", "fail"]
        command += ["--connector", json.dumps({"control": control})]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **wanted.environment}
            )

    def wait_until_ready(self):
        """Wait until it answers. Raises NoAnswerError: it has ended, or is late."""

        def is_over():
            with suppress(NoAnswerError):
                return Request(self.port, "/health").status() == OK
            return self._process.poll() is not None

        if not becomes(is_over, START_TIMEOUT_S) or self._process.poll() is not None:
            raise NoAnswerError(f"minillm did not start: {self.log_text()[-400:]}")

    def log_text(self):
        """Return its log so far."""
        return self._log.read_text(errors="replace")

    def submit(self, prompt, params=None, max_tokens=12):
        """Request the tokens after a prompt. Returns the request."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
        return Completion(self.port, "/v1/completions", body | {"kv_transfer_params": params})

    def ask(self, prompt, **options):
        """Ask only this engine."""
        return self.submit(prompt, **options).answer()

    def begin_prefill(self, prompt, names):
        """Have a prompt computed for the transfer with these names. Returns the request."""
        return self.submit(prompt, {"do_remote_decode": True, **names.params}, max_tokens=1)

    @property
    def where(self):
        """Return where its directory service is, as SGLang's decode engine takes it."""
        return {"bootstrap_host": f"{self.engine_id}@127.0.0.1", "bootstrap_port": self._port}

    @property
    def remote(self):
        """Return the same as vLLM's and minillm's decode engines take it."""
        return {
            "remote_engine_id": self.engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": self._port,
            "remote_public_key": "",
        }

    def begin_decode(self, prompt, names, prefill, **options):
        """Ask for the tokens after a prompt that `prefill` computes. Returns the request."""
        params = {"do_remote_prefill": True, **prefill.remote, **names.params}
        return self.submit(prompt, params, **options)

    def result(self, request):
        """Wait for a request's answer."""
        return request.answer()

    def forget(self):
        """Empty its prefix cache."""
        Request(self.port, "/reset_prefix_cache", {}).status()

    def check_idle(self):
        """Return what the engine still holds, "" if it is nothing."""

        def is_free():
            self.forget()
            text = Request(self.port, "/metrics").text()
            found = dict(line.split(" ")[:2] for line in text.splitlines() if line[:1] != "#")
            return found["minillm_free_blocks"] == found["minillm_blocks"]

        return "" if becomes(is_free, 30.0) else "it still holds blocks"

    def pause(self):
        self._process.send_signal(signal.SIGSTOP)

    def kill(self):
        self._process.kill()
        self._process.wait()

    stop = kill


class Completion(Request):
    """A request for a completion with tokens."""

    def answer(self):
        """Wait for the answer."""
        status, text = self._response(ANSWER_TIMEOUT_S)
        content = json.loads(text)
        if status != OK:
            return Answer([], str(content["error"]["message"]))
        (choice,) = content["choices"]
        return Answer(choice["token_ids"])


def by_layer(digests):
    """Return digests by the layer's number and the head, whatever an engine calls its layers."""
    return {(int(re.search(r"\d+", name)[0]), head): of for (name, head), of in digests.items()}


def python_of_sglang():
    """Return the interpreter of SGLang's environment, or exit: the harness has been started without it."""
    if not os.environ.get(PYTHON):
        sys.exit(
            f"{PYTHON} must name the interpreter of SGLang's environment: use scripts/test_mixed"
        )
    return os.environ[PYTHON]
