"""`scripts/bench_vllm`: two engines with kvconnector and two with NixlConnector, alive at once and asked in turns."""

import argparse
import importlib.util
import json
import os
import shlex
import signal
import sys
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

from tests.vllm.bench.measure import BURSTS, Contender, Plan, Turns
from tests.vllm.bench.report import as_markdown, draw, save
from tests.vllm.bench.server import serve
from tests.vllm.harness.cases import Case
from tests.vllm.harness.device import Device
from tests.vllm.harness.engine import EngineSpec
from tests.vllm.harness.model import make_model
from tests.vllm.harness.pair import Pair
from tests.vllm.harness.report import NIXL, OURS, environment, say
from tests.vllm.harness.runner import in_own_process, preload, side_channel, transfer_config

ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
TIER = "tier"
TIER_SHARES = {"tier-0": 0.0, "tier-80": 0.8, "tier-100": 1.0}
"""Of each prompt, what the decode engine's tier has."""
STREAMED = {OURS: "streamed", "computed": "computed-streamed"}
"""Pairs that are also asked both at once, and that contender's name."""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
PLANS = {
    "cpu": Plan(
        lengths=[128, 512], step_tokens=256, burst_requests=4, burst_tokens=256, churn_tokens=0
    ),
    "cuda": Plan(
        lengths=[512, 2048, 8192],
        step_tokens=2048,  # vLLM's default
        burst_requests=8,
        burst_tokens=4096,
        churn_tokens=150_000,
    ),
}


def main():
    """0 when every request was answered."""
    arguments = parse()
    folder = arguments.folder
    if arguments.draw:
        draw(json.loads(arguments.draw.read_text()), folder / "bench.svg")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder.mkdir(parents=True, exist_ok=True)
    device = Device(arguments.device)
    preload(device)
    import vllm

    in_own_process(lambda: _model(arguments))
    facts = environment(device=device.name, vllm=vllm.__version__)
    command, plan = shlex.join(["scripts/bench_vllm", *sys.argv[1:]]), _plan(arguments)

    def keep(found):
        return save(folder, found, plan, facts, command)

    with ExitStack() as stack:
        pairs = {}
        for name in arguments.connectors.split(","):
            specs = (_spec(arguments, plan, device, name, half) for half in ROLES)
            pairs[name] = stack.enter_context(closing(Pair(*specs, run=serve)))
        contenders = {}
        for name, pair in pairs.items():
            shares = TIER_SHARES if name == TIER else {name: None}
            contenders |= {each: Contender(pair, in_tier=share) for each, share in shares.items()}
            if name in STREAMED:
                contenders[STREAMED[name]] = Contender(pair, is_streamed=True)
        turns = Turns(contenders, plan, say, keep)
        with suppress(KeyboardInterrupt):  # what is known at that point
            turns.run()
        report = keep(turns.found)
        say(as_markdown(report))
        if importlib.util.find_spec("matplotlib"):
            draw(report, folder / "bench.svg")
        else:
            say(f"no plot without matplotlib; elsewhere: --draw {folder / 'bench.json'}")
    return 0 if all(len(each.bursts) == BURSTS for each in turns.found.values()) else 1


def parse():
    has_nixl = importlib.util.find_spec("nixl") is not None
    parser = argparse.ArgumentParser(prog="scripts/bench_vllm", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--connectors",
        default=f"{OURS},{NIXL}" if has_nixl else OURS,
        help=f"of {OURS}, {NIXL}, computed ({OURS} with first_token=never), {TIER} ({OURS} beside vLLM's"
        " OffloadingConnector, which has none, most or all of each prompt)",
    )
    parser.add_argument("--repetitions", type=int, default=25)
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
    plan = replace(PLANS[arguments.device], repetitions=arguments.repetitions)
    return replace(plan, step_tokens=arguments.step_tokens or plan.step_tokens)


def _model(arguments):
    """A small one on the CPU; on GPUs Llama-3.1 8B's shape, whose weights each engine makes."""
    if arguments.device == "cpu":
        return make_model(arguments.folder / "models")
    path = arguments.folder / "models" / "llama-8b"
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(LLAMA_8B))
    return path


def _spec(arguments, plan, device, connector, half):
    is_cpu = device.kind == "cpu"
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
    # the same connector, whose decode engine computes the prompt's last token
    options_of_ours = {"first_token": "never"} if connector == "computed" else {}
    found_by = "ranges" if connector == TIER else "path"
    case = Case(name="bench", options=options_of_ours, found_by=found_by)
    names = {"kv_role": ROLES[half], "engine_id": f"{connector}-{half}"}
    cache_bytes = 1 << (28 if is_cpu else 33)
    return EngineSpec(
        model=str(_model(arguments)),
        transfer=transfer_config(case, connector, device, names, cache_bytes),
        dtype="float32" if is_cpu else "bfloat16",
        block_size=64 if is_cpu else 16,
        cache_bytes=cache_bytes,
        arguments=options,
        environment={
            **device.environment(list(ROLES).index(half), 1),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            **side_channel(connector),
        },
        log=arguments.folder / f"{names['engine_id']}.log",
    )


if __name__ == "__main__":
    sys.exit(main())
