"""Launchers and routers around whole engines: through them a client gets the answers of one engine alone."""

import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from types import MappingProxyType

from kvconnector.control.security import AUTHORIZED_CLIENTS_FILE, SECRET_KEY_FILE, generate_keys
from tests.hosts.network import Network
from tests.support.ports import free_ports
from tests.vllm.harness.report import becomes
from tests.vllm.harness.servers import (
    MAX_TOKENS,
    TIMEOUT_S,
    Servers,
    complete,
    failures,
    fetch,
    samples_of,
    transfers,
)
from vllm_1p1d import run as example

PROMPTS = 4
MODEL = "tiny"
SIDES = {"prefill": "kv_producer", "decode": "kv_consumer"}
RAY_PORTS = ("--port", "8000", "--metrics", "9400")
"""A port for a host of its own, where every port is free."""
RAY_APP = (sys.executable, "-m", "tests.vllm.harness.ray_app")


def compare_through(url, model, outcome, expected):
    """Compare completions through a launcher at `url`, every second one streamed, with `expected`."""
    for seed, tokens in enumerate(expected):
        is_streamed = seed % 2 == 1
        what = f"prompt {seed}{' streamed' if is_streamed else ''}"
        answer = complete(url, model, seed, is_streamed=is_streamed)
        outcome.compare(what, answer, tokens)
        outcome.check(f"{what}: tokens", answer.num_tokens, MAX_TOKENS)
        outcome.check(f"{what}: comes in parts", answer.num_parts > 1, is_streamed)


def vllm_router(folder, outcome, device):
    """Run vllm-router with a prefill and a decode server."""
    with ExitStack() as stack:
        servers = Servers(folder, stack, device)
        port = free_ports((0, 1))
        command = [sys.executable, "-m", "vllm_router.launch_router", "--vllm-pd-disaggregation"]
        for role in ("prefill", "decode"):
            command += [f"--{role}", servers.urls[role]]
        command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(port + 1)]
        router = example.start(stack, folder / "logs" / "router.log", command)
        url = f"http://127.0.0.1:{port}"
        example.wait_for(f"{url}/health", router, "router")
        # from the prefill engine: the decode engine must not have the prompts in its prefix cache
        alone = [complete(servers.urls["prefill"], servers.model, n).tokens for n in range(PROMPTS)]
        compare_through(url, servers.model, outcome, alone)
        _check_loaded(outcome, servers.metrics("decode"))


def ray_serve(folder, outcome, device):
    """Run `examples/launchers/ray_serve.py` on this host's CPUs."""
    model, expected = _alone(folder, device)
    with ExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-")))
        generate_keys(short / "keys")
        port = free_ports((0, 1))
        command = [*RAY_APP, "--model", model, "--keys", str(short / "keys")]
        command += ["--folder", str(short), "--port", str(port), "--metrics", str(port + 1)]
        app = example.start(stack, folder / "logs" / "app.log", command, ray_token())
        _compare_ray(app, f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}", outcome, expected)


def ray_nodes(folder, outcome, device):
    """Run it on two Ray nodes, each a host of its own: the prefill engine on one, the decode engine on the other."""
    model, expected = _alone(folder, device)
    os.environ |= ray_token()
    with ExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-")))
        generate_keys(short / "keys")
        files = short / "files"
        files.mkdir()
        network = stack.enter_context(Network())
        nodes = {side: network.host(side) for side in SIDES}
        address = f"{nodes['prefill'].address}:6379"

        def start(name, node, *command):
            log = stack.enter_context((folder / "logs" / f"{name}.log").open("wb"))
            output = {"stdout": log, "stderr": subprocess.STDOUT}
            return node.start([sys.executable, "-m", *command], **output).popen

        for side, node in nodes.items():
            # both nodes name their files alike, and find their own address by their default route
            node.run(["mount", "-t", "tmpfs", "tmpfs", str(files)])
            node.run(["ip", "route", "add", "default", "via", network.address])
            command = ["ray.scripts.scripts", "start", "--block", "--num-cpus=6"]
            command += [f"--node-ip-address={node.address}", f"--object-store-memory={200 << 20}"]
            command += [f"--resources={json.dumps({side: 1})}", "--disable-usage-stats"]
            head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={files}"]
            command += head if side == "prefill" else [f"--address={address}"]
            start(f"node-{side}", node, *command)
        log = folder / "logs" / "node-decode.log"
        outcome.check("the second node", becomes(lambda: "Ray runtime started" in log.read_text()))
        command = [RAY_APP[-1], "--address", address, "--host", nodes["prefill"].address]
        command += ["--model", model, "--keys", str(short / "keys"), *RAY_PORTS]
        app = start("app", nodes["prefill"], *command)
        places = (
            f"{nodes['prefill'].address}:{RAY_PORTS[1]}",
            f"{nodes['decode'].address}:{RAY_PORTS[3]}",
        )
        with network.inside():
            _compare_ray(app, *places, outcome, expected)


def dynamo(folder, outcome, device):
    """Run two workers of NVIDIA Dynamo and its frontend, which find each other through files."""
    model, expected = _alone(folder, device)
    _complete_model(Path(model))
    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo-")))
        generate_keys(own / "keys")
        common = {"DYN_FILE_KV": str(own / "discovery"), "HF_HUB_OFFLINE": "1"}
        port = free_ports(range(5), highest=2**15 - 1)  # Dynamo reads a signed 16-bit number
        url = f"http://127.0.0.1:{port}"
        for number, (side, role) in enumerate(SIDES.items(), 1):
            command, environment = _dynamo_worker(side, role, model, own / "keys", port + number)
            log = folder / "logs" / f"{side}-worker.log"
            worker = example.start(stack, log, command, common | environment)
            example.wait_for(f"http://127.0.0.1:{port + number}/health", worker, side)
        command = [sys.executable, "-m", "dynamo.frontend", "--discovery-backend", "file"]
        command += ["--http-host", "127.0.0.1", "--http-port", str(port)]
        example.start(stack, folder / "logs" / "frontend.log", command, common)
        metrics = f"http://127.0.0.1:{port + 2}/metrics"
        _wait_for_a_transfer(url, metrics)
        _compare_loaded(url, metrics, outcome, expected)


def _dynamo_worker(side, role, model, keys, port):
    """Return command and environment of a worker that serves its state and metrics at `port`."""
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "kvconnector.integrations.vllm",
        "kv_role": role,
        "kv_load_failure_policy": "fail",
    }
    command = [sys.executable, "-m", "tests.vllm.harness.dynamo_worker", "--model", model]
    command += ["--served-model-name", MODEL, "--discovery-backend", "file"]
    command += ["--disaggregation-mode", side, "--kv-transfer-config", json.dumps(transfer)]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"]
    command += ["--kv-cache-memory-bytes", str(128 << 20), "--block-size", "64"]
    environment = {
        "DYN_SYSTEM_PORT": str(port),
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 2),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "KVCONNECTOR_CONTROL_SECRET_KEY_FILE": str(keys / SECRET_KEY_FILE),
        "KVCONNECTOR_CONTROL_AUTHORIZED_CLIENTS_FILE": str(keys / AUTHORIZED_CLIENTS_FILE),
    }
    return command, environment


def _complete_model(path):
    """Add a chat template and an end token, without which the frontend serves no model."""
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    files = (
        ("tokenizer_config", {"chat_template": template}),
        ("generation_config", {"eos_token_id": 0}),
    )
    for name, more in files:
        file = path / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | more))


def _wait_for_a_transfer(url, metrics):
    """Wait until the frontend has found both workers: until then it asks only the decode worker."""
    deadline = time.monotonic() + TIMEOUT_S
    for seed in count(PROMPTS):
        with suppress(RuntimeError, OSError):  # it is not there, or knows no model
            complete(url, MODEL, seed)
            if transfers(_samples(metrics)):
                return
        if time.monotonic() > deadline:
            raise RuntimeError("no prompt came by a transfer; see the logs")
        time.sleep(0.5)


def _alone(folder, device):
    """Make a model and ask one engine alone; returns the model's path and the answers."""
    with ExitStack() as stack:
        servers = Servers(folder, stack, device, options={"decode": ""})
        url, model = servers.urls["decode"], servers.model
        return model, [complete(url, model, seed).tokens for seed in range(PROMPTS)]


def _samples(url):
    return samples_of(fetch("GET", url))


def ray_token():
    """Return variables for all processes of an application. Without them Ray writes a token into the user's home, which
    other hosts lack.
    """
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _compare_ray(app, address, metrics_address, outcome, expected):
    """Wait for the application at `address` and the decode engine's metrics, then compare."""
    url, metrics = f"http://{address}", f"http://{metrics_address}/metrics"
    for ready in (metrics, f"{url}/v1/models"):
        example.wait_for(ready, app, "Ray Serve application")
    _compare_loaded(url, metrics, outcome, expected)


def _compare_loaded(url, metrics, outcome, expected):
    before = _samples(metrics)
    compare_through(url, MODEL, outcome, expected)
    _check_loaded(outcome, _samples(metrics), before)


def _check_loaded(outcome, samples, before=MappingProxyType({})):
    """Check that every prompt came by a transfer since the decode engine's samples were `before`."""
    outcome.check("transfers", transfers(samples) - transfers(before), PROMPTS)
    outcome.check("no failure", failures(samples), {})
