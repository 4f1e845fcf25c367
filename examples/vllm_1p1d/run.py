"""Start a prefill engine, a decode engine and a router, and compare their answer with the decode engine's alone."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from http.client import HTTPConnection
from math import prod
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that any directory may be the current one
from vllm_1p1d.model import make_model

HERE = Path(__file__).parent
START_TIMEOUT_S = 600.0
CONTROL_PORT_OFFSETS = {"prefill": 11, "decode": 111}
"""Distance from the router's port to each engine's first control port; other data-parallel ranks take the next."""
STOP_TIMEOUT_S = 15.0
PROMPT_WORDS = 300
WARM_UP_STEPS, STEPS = (13, 23), (17, 19)
"""Each makes a different prompt. A router's second prompt is the first that it sends to both engines at once."""
OK = 200


def main() -> int:
    """Run the example. Exit status 0 if the tokens are equal."""
    arguments = parse()
    if arguments.model is None:
        arguments.model = str(arguments.folder / "model")
        make_model(Path(arguments.model))
    base = arguments.port
    urls = {"prefill": f"http://127.0.0.1:{base + 1}", "decode": f"http://127.0.0.1:{base + 2}"}
    router_url = f"http://127.0.0.1:{base}"
    with ExitStack() as stack:
        engines = {}
        for number, name in enumerate(urls):
            command, environment = engine_command(
                name,
                number,
                model=arguments.model,
                port=base,
                connector=arguments.connector,
                gpus=getattr(arguments, f"{name}_gpus"),
                more=getattr(arguments, f"{name}_args"),
            )
            log = arguments.folder / f"{name}.log"
            engines[name] = start(stack, log, command, environment)
        for name, url in urls.items():
            wait_for(url + "/health", engines[name], name)
        router = start(
            stack,
            arguments.folder / "router.log",
            [
                *(sys.executable, str(HERE / "router.py"), "--port", str(base)),
                *("--prefill", urls["prefill"], "--decode", urls["decode"]),
            ],
        )
        wait_for(router_url + "/health", router, "router")
        are_equal = compare(arguments.model, router_url, urls["decode"])
        if not arguments.once:
            print(f"The router listens on {router_url}/v1 until interrupted.")
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0 if are_equal else 1


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: a small one with random weights, made here")
    parser.add_argument(
        "--port", type=int, default=8000, help="the router's; the engines take the next two"
    )
    parser.add_argument(
        "--folder", type=Path, default=HERE / "build", help="for logs and the model"
    )
    for option in ("--prefill-gpus", "--decode-gpus"):
        parser.add_argument(option, help="CUDA_VISIBLE_DEVICES of that engine; none: CPU")
    for option in ("--prefill-args", "--decode-args"):
        parser.add_argument(option, default="", help="more options of that engine")
    parser.add_argument(
        "--connector", default="KVConnector", help="or NixlConnector, where NIXL is installed"
    )
    parser.add_argument("--once", action="store_true", help="end after the comparison")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return arguments


def engine_command(
    role: str,
    number: int,
    *,
    model: str,
    port: int,
    connector: str = "KVConnector",
    policy: str = "recompute",
    gpus: str | None = None,
    more: str = "",
) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of an engine, the `number`-th on this host, beside a router at `port`."""
    transfer = {
        "kv_connector": connector,
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_load_failure_policy": policy,
    }
    if connector == "KVConnector":
        transfer["kv_connector_module_path"] = "kvconnector.integrations.vllm"
    command = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", model, "--host", "127.0.0.1", "--port", str(port + 1 + number)),
        *("--kv-transfer-config", json.dumps(transfer)),
    ]
    options = shlex.split(more)
    environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + CONTROL_PORT_OFFSETS[role])}
    if gpus is None:
        command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "4096"]
        command += ["--kv-cache-memory-bytes", str(256 << 20), "--block-size", "64"]
        ranks = range(number, number + num_ranks(options))
        environment |= {
            # one CPU for each rank
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(r % (os.cpu_count() or 1)) for r in ranks),
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
        }
    else:
        environment["CUDA_VISIBLE_DEVICES"] = gpus
    return [*command, *options], environment


def num_ranks(options: list[str]) -> int:
    """Number of worker processes of an engine with these options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    parser.add_argument("--data-parallel-size", "-dp", type=int, default=1)
    sizes = vars(parser.parse_known_args(options)[0])
    return prod(sizes.values())


def start(
    stack: ExitStack, log: Path, command: list[str], environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process that ends, with its children, when `stack` is closed."""
    print(f"starting {shlex.join(command)}\n  log: {log}")
    process = subprocess.Popen(
        command,
        stdout=stack.enter_context(log.open("wb")),
        stderr=subprocess.STDOUT,
        env=os.environ | (environment or {}),
        start_new_session=True,
    )
    stack.callback(stop, process)
    return process


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process with its children, and kill those that do not end."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
        except ProcessLookupError:
            return
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            continue


def wait_for(url: str, process: subprocess.Popen[bytes], name: str) -> None:
    """Wait until `url` answers; if the engine ends first, so does the example."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the {name} ended with status {process.returncode}; see its log")
        try:
            if http("GET", url, timeout_s=5)[0] == OK:
                return
        except OSError:
            pass
        time.sleep(0.5)
    raise SystemExit(f"the {name} did not start within {START_TIMEOUT_S} s; see its log")


def compare(model: str, router_url: str, decode_url: str) -> bool:
    """Compare greedy completions through the router with those of the decode engine alone, and their times.

    Both ways are used once before they are timed, since the first request meets the other engine and what it runs for
    the first time is compiled. The decode engine then computes each prompt as one that it has not seen: `cache_salt`
    keeps it from finding the blocks that it has just loaded.
    """
    ways = {"disaggregated": router_url, "decode engine alone": decode_url}

    def timed(step: int) -> dict[str, tuple[str, float]]:
        prompt = " ".join(f"w{step * number % 1021}" for number in range(PROMPT_WORDS))
        found = {}
        for name, url in ways.items():
            body = {"model": model, "prompt": prompt, "max_tokens": 16}
            if url == decode_url:
                body["cache_salt"] = "alone"
            started = time.perf_counter()
            text = complete(url, body)
            found[name] = text, (time.perf_counter() - started) * 1e3
        return found

    first_ms = max(timed(step)["disaggregated"][1] for step in WARM_UP_STEPS)
    print(
        f"The first request through the router took {first_ms:.0f} ms, with all that happens once."
    )
    are_equal = True
    # the router knows the prefill engine by now, and asks both engines at once
    for step in STEPS:
        found = timed(step)
        for name, (text, milliseconds) in found.items():
            print(f"{name:20} {milliseconds:8.1f} ms  {text!r}")
        are_equal &= len({text for text, _ in found.values()}) == 1
    print("The tokens are equal." if are_equal else "The tokens DIFFER.")
    return are_equal


def complete(url: str, body: dict[str, Any]) -> str:
    """POST /v1/completions."""
    status, answer = http("POST", url + "/v1/completions", {**body, "temperature": 0.0})
    if status != OK:
        raise SystemExit(f"{url} answered {status}: {answer.decode(errors='replace')}")
    text: str = json.loads(answer)["choices"][0]["text"]
    return text


def http(
    method: str,
    url: str,
    body: dict[str, Any] | None = None,
    timeout_s: float = 300,
    headers: dict[str, str] | None = None,
) -> tuple[int, bytes]:
    """Make one request. Returns `(status, body)`."""
    address = urlsplit(url)
    connection = HTTPConnection(str(address.hostname), address.port, timeout=timeout_s)
    try:
        payload = json.dumps(body) if body is not None else None
        sent = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, address.path, payload, sent)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
