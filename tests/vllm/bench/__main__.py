"""`scripts/bench_vllm`: two engines with kvconnector and two with NixlConnector, alive at once and asked in turns."""

import argparse
import importlib.util
import json
import os
import shlex
import signal
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from tests.vllm.bench.measure import Engines, Plan, Streamed, Turns
from tests.vllm.bench.report import as_markdown, as_report, draw, save
from tests.vllm.bench.server import serve
from tests.vllm.harness.cases import Case
from tests.vllm.harness.device import Device
from tests.vllm.harness.engine import Engine, EngineSpec
from tests.vllm.harness.model import VOCAB_SIZE, make_model
from tests.vllm.harness.pair import Asker
from tests.vllm.harness.report import NIXL, OURS, environment
from tests.vllm.harness.runner import in_own_process, preload, side_channel, transfer_config

START_TIMEOUT_S = 600.0
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
LLAMA_VOCABULARY = 128256
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": LLAMA_VOCABULARY,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "bos_token_id": 0,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
PLANS = {
    "cpu": Plan(
        lengths=[128, 512],
        step_tokens=256,
        burst_requests=4,
        burst_tokens=256,
        churn_tokens=0,
        churn_longest=200,
        vocabulary=VOCAB_SIZE,
    ),
    "cuda": Plan(
        lengths=[512, 2048, 8192],
        step_tokens=2048,  # vLLM's default
        burst_requests=8,
        burst_tokens=4096,
        churn_tokens=150_000,
        churn_longest=900,
        vocabulary=LLAMA_VOCABULARY,
    ),
}


def main():
    """0 when every request was answered."""
    arguments = parse()
    if arguments.draw:
        draw(json.loads(arguments.draw.read_text()), arguments.folder / "bench.svg")
        return 0
    signal.signal(signal.SIGTERM, _exit)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    device = Device(arguments.device)
    preload(device)
    in_own_process(lambda: _model(arguments))
    facts, command = environment(device), shlex.join(["scripts/bench_vllm", *sys.argv[1:]])

    def keep(found):
        save(as_report(found, plan, facts, command), arguments.folder)

    plan = _plan(arguments)
    with ExitStack() as stack:
        pairs = {
            name: Engines(*(_start(stack, arguments, device, name, half) for half in ROLES))
            for name in arguments.connectors.split(",")
        }
        for pair in pairs.values():
            for asker in (pair.prefill, pair.decode):
                asker.engine.wait_until_ready(START_TIMEOUT_S)
        say("the engines are ready")
        contenders = {}
        for name, pair in pairs.items():
            contenders[name] = pair
            if name == OURS:
                contenders["streamed"] = Streamed(pair.prefill, pair.decode, pair.address)
        found = Turns(contenders, plan, say, keep).run()
    report = as_report(found, plan, facts, command)
    say(as_markdown(report))
    if importlib.util.find_spec("matplotlib"):
        draw(report, arguments.folder / "bench.svg")
    else:
        say(f"no plot without matplotlib; elsewhere: --draw {arguments.folder / 'bench.json'}")
    return 1 if any(each.error for each in found.values()) else 0


def say(text):
    """A line of the run's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse():
    """The command line."""
    has_nixl = importlib.util.find_spec("nixl") is not None
    parser = argparse.ArgumentParser(prog="scripts/bench_vllm", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--connectors", default=f"{OURS},{NIXL}" if has_nixl else OURS)
    parser.add_argument("--lengths", help="of prompts: 512,2048,8192 on GPUs")
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--bursts", type=int, default=3)
    parser.add_argument("--step-tokens", type=int, help="max_num_batched_tokens")
    parser.add_argument("--draw", type=Path, help="a bench.json of an earlier run: its plot alone")
    parser.add_argument(
        "--folder",
        type=Path,
        default=os.environ.get("KVC_BENCH_FOLDER"),
        required="KVC_BENCH_FOLDER" not in os.environ,
        help="for bench.json, bench.md, bench.svg and logs",
    )
    return parser.parse_args()


def _plan(arguments):
    plan = PLANS[arguments.device]
    lengths = arguments.lengths and [int(length) for length in arguments.lengths.split(",")]
    return replace(
        plan,
        lengths=lengths or plan.lengths,
        step_tokens=arguments.step_tokens or plan.step_tokens,
        repetitions=arguments.repetitions,
        bursts=arguments.bursts,
    )


def _model(arguments):
    """A small one on the CPU; on GPUs Llama-3.1 8B's shape, whose weights each engine makes."""
    if arguments.device == "cpu":
        return make_model(arguments.folder / "models")
    path = arguments.folder / "models" / "llama-8b"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA_8B))
    return path


def _start(stack, arguments, device, connector, half):
    is_cpu = device.kind == "cpu"
    transfer = transfer_config(Case(name="bench"), connector, ROLES[half])
    plan = _plan(arguments)
    options = {"max_num_seqs": 32, "max_num_batched_tokens": plan.step_tokens}
    if is_cpu:
        options |= {"enforce_eager": True, "max_model_len": 4096}
    else:
        options |= {
            "max_model_len": max(plan.lengths) + 4096,
            "gpu_memory_utilization": 0.4,
            "load_format": "dummy",
            "worker_extension_cls": "tests.vllm.bench.weights.RandomWeights",
        }
    spec = EngineSpec(
        model=str(_model(arguments)),
        transfer=transfer | {"engine_id": f"{connector}-{half}"},
        dtype="float32" if is_cpu else "bfloat16",
        block_size=64 if is_cpu else 16,
        cache_bytes=1 << (28 if is_cpu else 33),
        arguments=options,
        environment={
            **device.environment(list(ROLES).index(half), 1),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            **side_channel(connector),
        },
        log=arguments.folder / f"{connector}-{half}.log",
    )
    engine = Engine(spec, serve)
    stack.callback(engine.stop)
    return Asker(engine)


def _exit(number, frame):
    sys.exit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
