"""Launchers and routers around whole engines: what a client gets through them, beside what one engine alone answers."""

import json
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

from kvconnector.control.security import generate_keys
from tests.support.ports import free_ports
from tests.vllm.harness.servers import NUM_TOKENS, Servers, failures, samples_of, transfers
from vllm_1p1d import run as example

PROMPTS = 4
MAX_TOKENS = 16
RAY_APP = (sys.executable, "-m", "tests.vllm.harness.ray_app")


def complete(url, model, seed, *, is_streamed=False):
    """The words of a completion, of which each is a token; `num_tokens`, also of words that are not written, as "w0";
    `num_parts` in which it came.
    """
    body = {
        "model": model,
        "prompt": " ".join(f"w{(17 * number + 31 * seed) % 1021}" for number in range(NUM_TOKENS)),
        "max_tokens": MAX_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    if is_streamed:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    status, answer = example.http("POST", url + "/v1/completions", body)
    text = answer.decode(errors="replace")
    if status != example.OK:
        raise RuntimeError(f"{url} answered {status}: {text}")
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    events = [line for line in lines if line != "[DONE]"] if is_streamed else [text]
    parts = [json.loads(event) for event in events]
    choices = [choice for part in parts for choice in part["choices"]]
    usages = [part["usage"] for part in parts if part.get("usage")]
    return SimpleNamespace(
        tokens="".join(choice["text"] for choice in choices).split(),
        reason=choices[-1]["finish_reason"],
        num_tokens=usages[-1]["completion_tokens"],
        num_parts=len(choices),
    )


def compare_through(url, model, outcome, expected):
    """Completions through a launcher at `url`, every second one streamed, beside `expected`."""
    for seed, tokens in enumerate(expected):
        is_streamed = seed % 2 == 1
        what = f"prompt {seed}{' streamed' if is_streamed else ''}"
        answer = complete(url, model, seed, is_streamed=is_streamed)
        outcome.compare(what, answer, tokens)
        outcome.check(f"{what}: tokens", answer.num_tokens, MAX_TOKENS)
        outcome.check(f"{what}: comes in parts", answer.num_parts > 1, is_streamed)


def vllm_router(folder, outcome, device):
    """vllm-router in front of a prefill and a decode server."""
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
        # by the prefill engine: the decode engine must not have the prompts in its prefix cache
        alone = [complete(servers.urls["prefill"], servers.model, n).tokens for n in range(PROMPTS)]
        compare_through(url, servers.model, outcome, alone)
        _check_loaded(outcome, servers.metrics("decode"))


def ray_serve(folder, outcome, device):
    """`examples/launchers/ray_serve.py` on this host's CPUs."""
    model, expected = _alone(folder, device)
    with ExitStack() as stack:
        short = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-")))
        generate_keys(short / "keys")
        port = free_ports((0, 1))
        command = [*RAY_APP, "--model", model, "--keys", str(short / "keys")]
        command += ["--folder", str(short), "--port", str(port), "--metrics", str(port + 1)]
        app = example.start(stack, folder / "logs" / "app.log", command)
        url, metrics = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}/metrics"
        example.wait_for(f"{url}/v1/models", app, "Ray Serve application")
        before = _samples(metrics)
        compare_through(url, "tiny", outcome, expected)
        _check_loaded(outcome, _samples(metrics), before)


def _alone(folder, device):
    """The path of a model, and what one engine alone answers."""
    with ExitStack() as stack:
        servers = Servers(folder, stack, device, options={"decode": ""})
        url, model = servers.urls["decode"], servers.model
        return model, [complete(url, model, seed).tokens for seed in range(PROMPTS)]


def _samples(url):
    status, answer = example.http("GET", url)
    if status != example.OK:
        raise RuntimeError(f"{url} answered {status}")
    return samples_of(answer.decode())


def _check_loaded(outcome, samples, before=MappingProxyType({})):
    """Every prompt came by a transfer since the decode engine's samples were `before`."""
    outcome.check("transfers", transfers(samples) - transfers(before), PROMPTS)
    outcome.check("no failure", failures(samples), {})
