"""`scripts/bench_vllm`: two engines with kvconnector and two with NixlConnector, running at once and asked in turns."""

import argparse
import importlib.util
import os
import shlex
import signal
import sys
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, replace
from pathlib import Path

import msgspec

from tests.vllm.bench.measure import Contender, Plan, Turns
from tests.vllm.bench.report import Report, cases_of, draw, save
from tests.vllm.bench.server import serve
from tests.vllm.harness.cases import Case
from tests.vllm.harness.device import Device
from tests.vllm.harness.model import VOCAB_SIZE
from tests.vllm.harness.pair import Pair
from tests.vllm.harness.report import NIXL, OURS, environment, in_own_process, say
from tests.vllm.harness.runner import model_paths, preload, specs_of

TIER, PACKED = "tier", "packed"
SLEEPERS = ("sleep", "sleep-packed")
"""Pairs in vLLM's sleep mode, which gives their caches memory without IPC handles: read directly or not."""
CONNECTORS = (OURS, NIXL, PACKED, *SLEEPERS, "computed", TIER)
TIER_SHARES = {"tier-0": 0.0, "tier-80": 0.8, "tier-100": 1.0}
"""Shares of each prompt that the decode engine's tier has."""
STREAMED = {OURS: "streamed", "computed": "computed-streamed"}
"""Pairs whose engines are also asked both at once, mapped to that contender's name."""
V4_PRO, LLAMA_CACHES = "deepseek-v4-pro", "llama-8b-caches"
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
    # blocks of 1.4 MB, which are read whole or not: it does not matter where they are. Steps are slow: few tokens
    V4_PRO: Plan(
        lengths=[1000, 8192, 65536],
        step_tokens=4096,
        burst_requests=0,
        burst_tokens=0,
        churn_tokens=0,
        answer_tokens=2,
        candidates=1,
        is_told=False,
    ),
}
ENGINES = {
    "llama-8b": {"block_size": 16, "cache_bytes": 1 << 33, "arguments": {}},
    LLAMA_CACHES: {
        "block_size": 16,
        # a burst of 8 x 4096 tokens; six engines fit into 80 GB
        "cache_bytes": 5 << 30,
        "arguments": {
            "hf_overrides": {
                "hidden_size": 2048,
                "intermediate_size": 2048,
                "vocab_size": VOCAB_SIZE,
                "head_dim": 128,  # else of the hidden size
            },
            "enforce_eager": True,
            "gpu_memory_utilization": 0.1,
        },
    },
    V4_PRO: {
        "block_size": 256,
        # a prompt of 65,536 tokens; the engines of three connectors fit into 80 GB
        "cache_bytes": 5 << 30,
        "arguments": {
            "kv_cache_dtype": "fp8",
            "enforce_eager": True,
            "gpu_memory_utilization": 0.1,
        },
    },
}
MODELS = {
    "llama-8b": {"kind": "llama-8b"},
    LLAMA_CACHES: {"kind": "llama-8b"},
    V4_PRO: {"kind": "deepseek-v4", "layers": 61},
}
"""On GPUs: Llama-3.1 8B, and models with all of its caches or DeepSeek-V4-Pro's, whose other sizes are small."""


def main():
    """Run the bench. Exit status 0 if every request was answered."""
    arguments = parse()
    folder = arguments.folder
    if arguments.draw:
        report = msgspec.json.decode(arguments.draw.read_bytes(), type=Report)
        draw(report, folder / "bench.svg")
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    device = Device(arguments.device)
    preload(device)
    import vllm

    facts = environment(device=device.name, vllm=vllm.__version__)
    command, plan = shlex.join(["scripts/bench_vllm", *sys.argv[1:]]), _plan(arguments)
    connectors = arguments.connectors.split(",")
    cases = [_case(name, plan, device.kind, arguments.model) for name in connectors]
    in_own_process(lambda: model_paths(cases[0], folder))

    def keep(turns):
        found = tuple(cases_of(turns))
        report = Report(command=command, environment=facts, plan=asdict(plan), cases=found)
        say(save(folder, report))
        return report

    with ExitStack() as stack:
        pairs = {}
        for case in cases:
            specs = specs_of(case, case.name if case.name == NIXL else OURS, folder, device)
            pairs[case.name] = stack.enter_context(closing(Pair(*specs, run=serve)))
        contenders = {}
        for name, pair in pairs.items():
            shares = TIER_SHARES if name == TIER else {name: None}
            contenders |= {
                each: Contender(
                    pair,
                    plan.answer_tokens,
                    in_tier=share,
                    is_told=plan.is_told,
                    can_sleep=name in SLEEPERS,
                )
                for each, share in shares.items()
            }
            if name in STREAMED and arguments.model != V4_PRO:
                contenders[STREAMED[name]] = Contender(pair, plan.answer_tokens, is_streamed=True)
        turns = Turns(contenders, plan, say, keep)
        is_whole = False
        with suppress(KeyboardInterrupt):  # its earlier results are kept
            turns.run()
            is_whole = True
        report = keep(turns)
        if importlib.util.find_spec("matplotlib"):
            draw(report, folder / "bench.svg")
        else:
            say(f"no plot without matplotlib; elsewhere: --draw {folder / 'bench.json'}")
    return 0 if is_whole and not turns.errors else 1


def parse(given=None):
    """Return the options. Raises SystemExit: they are wrong."""
    has_nixl = importlib.util.find_spec("nixl") is not None
    parser = argparse.ArgumentParser(prog="scripts/bench_vllm", description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--connectors",
        default=f"{OURS},{NIXL}" if has_nixl else OURS,
        help=f"of {OURS}, {NIXL}, {PACKED} ({OURS} without direct reads), sleep and sleep-packed (the same two between"
        " engines with enable_sleep_mode, on GPUs, which in the end sleep and wake up), computed"
        f" ({OURS} with first_token=never), {TIER} ({OURS} beside vLLM's OffloadingConnector, which has none, most or"
        " all of each prompt)",
    )
    parser.add_argument("--model", choices=list(MODELS), default="llama-8b", help="on GPUs")
    parser.add_argument("--lengths", help="tokens of prompts, with commas between them")
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--step-tokens", type=int, help="max_num_batched_tokens")
    parser.add_argument("--draw", type=Path, help="a bench.json of an earlier run: its plot alone")
    parser.add_argument(
        "--folder",
        type=Path,
        default=os.environ.get("KVC_BENCH_FOLDER"),
        required="KVC_BENCH_FOLDER" not in os.environ,
        help="for bench.json, bench.txt, bench.svg and logs",
    )
    arguments = parser.parse_args(given)
    named = arguments.connectors.split(",")
    if unknown := [name for name in named if name not in CONNECTORS]:
        parser.error(f"--connectors: {', '.join(unknown)}: choose of {', '.join(CONNECTORS)}")
    if arguments.device == "cpu" and {*named} & {*SLEEPERS}:
        parser.error("--connectors: vLLM's engines sleep only on GPUs: add --device cuda")
    return arguments


def _plan(arguments):
    is_v4 = arguments.device == "cuda" and arguments.model == V4_PRO
    plan = PLANS[V4_PRO if is_v4 else arguments.device]
    plan = replace(plan, repetitions=arguments.repetitions)
    if arguments.lengths:
        plan = replace(plan, lengths=[int(each) for each in arguments.lengths.split(",")])
    return replace(plan, step_tokens=arguments.step_tokens or plan.step_tokens)


def _case(name, plan, kind, model):
    """Two engines of a small model on the CPU; on GPUs of a `model` with weights that each engine makes."""
    arguments = {"max_num_seqs": 32, "max_num_batched_tokens": plan.step_tokens}
    if kind == "cpu":
        arguments |= {"enforce_eager": True, "max_model_len": 4096}
        sizes = {"block_size": 64, "cache_bytes": 1 << 28}
    else:
        arguments |= {
            "max_model_len": max(plan.lengths) + 4096,
            "gpu_memory_utilization": 0.4,
            "load_format": "dummy",
            "worker_extension_cls": "tests.vllm.bench.weights.RandomWeights",
        }
        sizes = ENGINES[model]
        arguments |= sizes["arguments"]
    if name in SLEEPERS:
        arguments["enable_sleep_mode"] = True
    variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if name in (PACKED, "sleep-packed"):
        variables["KVCONNECTOR_PATHS_DIRECT"] = "never"
    engine = {**sizes, "arguments": arguments, "environment": variables}
    return Case(
        name,
        prefill=engine,
        decode=engine,
        model={} if kind == "cpu" else MODELS[model],
        # the same connector, but the decode engine computes the prompt's last token
        options={"first_token": "never"} if name == "computed" else {},
        found_by="ranges" if name == TIER else "path",
        gpu_dtype="bfloat16",
    )


if __name__ == "__main__":
    sys.exit(main())
