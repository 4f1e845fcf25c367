"""Start a prefill engine, a decode engine and a router, and an engine alone; compare the answers of both ways."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that any directory may be the current one
from vllm_1p1d.model import VOCAB_SIZE, make_model
from vllm_1p1d.run import OK, http, start, wait_for

HERE = Path(__file__).parent
NAMES = ("prefill", "decode", "alone")
PORTS = {"prefill": 1, "decode": 2, "alone": 3, "bootstrap": 4}
"""Distance from the router's port to each engine's."""
LENGTHS = (100, 300)
CPU_OPTIONS = """--device cpu --attention-backend torch_native --dtype float32 --disable-overlap-schedule --page-size 16
 --chunked-prefill-size 64 --max-total-tokens 8192 --max-running-requests 4 --mem-fraction-static 0.3
 --grammar-backend none --skip-tokenizer-init"""


def main() -> int:
    """Run the example. Exit status 0 if the tokens are equal."""
    arguments = parse()
    if arguments.model is None:
        arguments.model = str(arguments.folder / "model")
        make_model(Path(arguments.model))
    urls = {name: f"http://127.0.0.1:{arguments.port + offset}" for name, offset in PORTS.items()}
    router_url = f"http://127.0.0.1:{arguments.port}"
    with ExitStack() as stack:
        names = NAMES[: arguments.gpus.count(",") + 1] if arguments.gpus else NAMES
        engines = {
            name: start(stack, arguments.folder / f"{name}.log", *engine_command(arguments, name))
            for name in names
        }
        for name in names:
            wait_for(urls[name] + "/health", engines[name], f"{name} engine")
        command = [sys.executable, str(HERE / "router.py"), "--port", str(arguments.port)]
        command += ["--prefill", urls["prefill"], "--decode", urls["decode"]]
        command += ["--bootstrap-port", str(arguments.port + PORTS["bootstrap"])]
        router = start(stack, arguments.folder / "router.log", command)
        wait_for(router_url + "/health", router, "router")
        asked = [router_url, urls["alone"]] if "alone" in names else [router_url]
        are_equal = compare(asked)
        if not arguments.once:
            print(f"The router listens on {router_url} until interrupted.")
            signal.sigwait({signal.SIGINT, signal.SIGTERM})
    return 0 if are_equal else 1


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="default: a small one with random weights, made here")
    parser.add_argument("--port", type=int, default=8000, help="the router's; four more follow")
    parser.add_argument("--folder", type=Path, default=HERE / "build", help="for logs and model")
    parser.add_argument("--gpus", help="such as 0,1: prefill, decode, alone; none: CPU")
    for name in NAMES:
        parser.add_argument(f"--{name}-args", default="", help="more options of this engine")
    parser.add_argument("--once", action="store_true", help="end after the comparison")
    arguments = parser.parse_args()
    if arguments.gpus and arguments.gpus.count(",") not in (1, 2):
        parser.error("--gpus names two or three GPUs")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    return arguments


def engine_command(arguments: argparse.Namespace, name: str) -> tuple[list[str], dict[str, str]]:
    """Return command and environment of the engine `name`: "prefill", "decode" or "alone"."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", arguments.model]
    command += ["--host", "127.0.0.1", "--port", str(arguments.port + PORTS[name])]
    environment = {}
    if arguments.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = arguments.gpus.split(",")[NAMES.index(name)]
    else:
        command += ["--skip-server-warmup", *shlex.split(CPU_OPTIONS)]
        environment |= {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1"}
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
    if name != "alone":
        command += ["--disaggregation-mode", name]
        command += ["--disaggregation-transfer-backend", "kvconnector"]
    if name == "prefill":
        command += ["--disaggregation-bootstrap-port", str(arguments.port + PORTS["bootstrap"])]
    elif name == "decode" and not arguments.gpus:
        # SGLang's own choice is pinned memory, which needs CUDA
        command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return [*command, *shlex.split(getattr(arguments, f"{name}_args", ""))], environment


def compare(urls: list[str]) -> bool:
    """Request the same greedy completions from each URL and print them. Returns True if they are equal."""
    are_equal = True
    for length in LENGTHS:
        prompt = [1 + 17 * number % (VOCAB_SIZE - 1) for number in range(length)]
        answers = [generate(url, prompt) for url in urls]
        for url, tokens in zip(urls, answers, strict=True):
            print(f"{length} tokens, {url}: {tokens}")
        are_equal &= all(tokens == answers[0] for tokens in answers)
    print("The tokens are equal." if are_equal else "The tokens DIFFER.")
    return are_equal


def generate(url: str, prompt: list[int]) -> list[int]:
    """POST /generate."""
    sampling = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling}
    status, answer = http("POST", url + "/generate", body)
    if status != OK:
        raise SystemExit(f"{url} answered {status}: {answer.decode(errors='replace')}")
    tokens: list[int] = json.loads(answer)["output_ids"]
    return tokens


if __name__ == "__main__":
    sys.exit(main())
