"""NVIDIA Dynamo around whole engines: through it a client gets the answers of one engine alone."""

import json
import os
import sys
import tempfile
import time
import tomllib
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

from tests.sglang.harness.engine import OPTIONS
from tests.support.ports import free_ports
from tests.vllm.harness.launchers import compare_through
from tests.vllm.harness.servers import MAX_TOKENS, complete, prompt_of
from vllm_1p1d import run as example
from vllm_1p1d.model import save_tokenizer

DYNAMO = "KVC_DYNAMO"
"""The variable that names a folder with Dynamo's wheels: see scripts/test_sglang --launchers."""
ROOT = Path(__file__).parents[3]
OURS = "ours"
MODEL = "tiny"
PROMPTS = 4
FIRST_TRANSFER_S = 60.0
TEMPLATE = "{% for message in messages %}{{ message.content }} {% endfor %}"
SIDES = ("prefill", "decode")
CHOSEN = "'disaggregation_transfer_backend': 'kvconnector'"
"""What SGLang logs of a worker's options. A decode worker computes no prompt, so its answers come by transfers."""
HOSTS = (
    "DYN_TCP_RPC_HOST",
    "DYN_TCP_RESPONSE_STREAM_HOST",
    "DYN_EVENT_PLANE_HOST",
    "DYN_SYSTEM_HOST",
    "SGLANG_HOST_IP",  # what a prefill worker tells of itself
)
"""Variables that name a process's own address."""


def why_not():
    """Return why Dynamo cannot be started here; "" if it can."""
    return "" if os.environ.get(DYNAMO) else "needs Dynamo: scripts/test_sglang --launchers"


def dynamo(folder, outcome, model, alone):
    """Run Dynamo's prefill and decode worker and its frontend, which find each other through files."""
    _complete_model(model)
    expected = [_words(alone.ask(_tokens(seed), max_tokens=MAX_TOKENS)) for seed in range(PROMPTS)]
    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo-")))
        declare_entry_points(own / "declared")
        folders = os.environ["PYTHONPATH"], str(own / "declared"), os.environ[DYNAMO]
        common = {
            "PYTHONPATH": os.pathsep.join(folders),
            "SGLANG_PLUGINS": OURS,  # not those of an installed distribution, which may be older
            "DYN_FILE_KV": str(own / "discovery"),
            **dict.fromkeys(HOSTS, "127.0.0.1"),
            "HF_HUB_OFFLINE": "1",
        }
        port = free_ports(range(4), highest=2**15 - 1)  # Dynamo reads a signed 16-bit number
        url = f"http://127.0.0.1:{port}"
        workers = []
        for number, side in enumerate(SIDES, 1):
            command = [sys.executable, "-m", "tests.sglang.harness.dynamo_worker"]
            command += [*_worker_options(side, model), "--discovery-backend", "file"]
            if side == "prefill":
                command += ["--disaggregation-bootstrap-port", str(port + 3)]
            else:
                command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
            log = folder / f"{side}.log"
            workers.append(
                example.start(stack, log, command, common | {"DYN_SYSTEM_PORT": str(port + number)})
            )
        for number, (side, worker) in enumerate(zip(SIDES, workers, strict=True), 1):
            example.wait_for(f"http://127.0.0.1:{port + number}/health", worker, side)
        command = [sys.executable, "-m", "dynamo.frontend", "--discovery-backend", "file"]
        command += ["--http-host", "127.0.0.1", "--http-port", str(port)]
        example.start(stack, folder / "frontend.log", command, common)
        _wait_for_an_answer(url)
        compare_through(url, MODEL, outcome, expected)
    for side in SIDES:
        log = (folder / f"{side}.log").read_text(errors="replace")
        outcome.check(f"the {side} worker has our backend", CHOSEN in log)


def declare_entry_points(folder, groups=("sglang.srt.plugins", "sglang.srt.platforms")):
    """Make a distribution `OURS` in `folder` that has the entry points of this checkout's, of some `groups`."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "entry-points"
    ]
    info = folder / f"{OURS}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {OURS}\nVersion: 0\n", "utf-8")
    sections = [f"[{group}]\n{OURS} = {declared[group]['kvconnector']}\n" for group in groups]
    (info / "entry_points.txt").write_text("\n".join(sections), "utf-8")


def _worker_options(side, model):
    options = {
        "model-path": str(model),
        **{name: value for name, value in OPTIONS.items() if name != "skip-server-warmup"},
        "served-model-name": MODEL,
        "device": "cpu",
        "attention-backend": "torch_native",
        "disable-overlap-schedule": True,
        "disaggregation-mode": side,
        "disaggregation-transfer-backend": "kvconnector",
    }
    flags = []
    for name, value in options.items():
        flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return flags


def _complete_model(path):
    """Add what Dynamo's frontend needs to serve a model: a tokenizer, a chat template and an end token."""
    if not (path / "tokenizer.json").exists():
        save_tokenizer(path)
    added = (
        ("tokenizer_config", "chat_template", TEMPLATE),
        ("generation_config", "eos_token_id", 0),
    )
    for name, key, value in added:
        file = path / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))


def _tokens(seed):
    return [int(word[1:]) for word in prompt_of(seed).split()]


def _words(answer):
    return [f"w{token}" for token in answer.tokens if token]  # w0 is not written


def _wait_for_an_answer(url):
    """Wait until the frontend has found both workers: a decode worker computes no prompt itself."""
    deadline = time.monotonic() + FIRST_TRANSFER_S
    for seed in count(PROMPTS):
        with suppress(RuntimeError, OSError):
            complete(url, MODEL, seed)
            return
        if time.monotonic() > deadline:
            raise RuntimeError("no prompt was answered; see the logs")
        time.sleep(0.5)
