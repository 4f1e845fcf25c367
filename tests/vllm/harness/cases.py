"""The cases, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from tests.vllm.harness import launchers
from tests.vllm.harness import scenarios as s
from tests.vllm.harness.data_parallel import address_per_rank, one_address
from tests.vllm.harness.device import Device
from tests.vllm.harness.encoder import encoder
from tests.vllm.harness.pair import Pair
from tests.vllm.harness.report import Outcome
from tests.vllm.harness.servers import failed_answers, http_example, metrics


@dataclass(frozen=True)
class Case:
    """Two engines and the scenario that drives them.

    `prefill` and `decode` are arguments of `EngineSpec`, and "draft": they speculate with the model itself
    ("draft_model"), with an "eagle", or with the model's own layers ("mtp"). Of servers only "dp_size" counts.
    `found_by`: vLLM finds the connector by a module's path, by its plugin's name, or as the child of a `MultiConnector`
    ("multi"), which may have vLLM's OffloadingConnector first: ours loads from both ("ranges"), vLLM's own from the
    first that has anything ("first-hit"). `servers` runs API servers instead of all this. `is_quick`: run for every
    change. `has_nixl`: NixlConnector runs it too. `needs`: "gpus" if vLLM's CPU code cannot run it, "cpus" if its code
    for GPUs cannot, "hosts" made of namespaces, or packages of a launcher or router. `gpu_dtype`: for attention that
    takes no float32.
    """

    name: str
    scenario: Callable[[Pair, Outcome], None] = s.tokens
    prefill: dict[str, Any] = field(default_factory=dict)
    decode: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    policy: str = "fail"
    options: dict[str, Any] = field(default_factory=dict)
    roles: tuple[str, str] = ("kv_producer", "kv_consumer")
    leaves_nothing: bool = True
    found_by: Literal["path", "name", "multi", "ranges", "first-hit"] = "path"
    servers: Callable[[Path, Outcome, Device], None] | None = None
    is_quick: bool = False
    has_nixl: bool = True
    needs: tuple[str, ...] = ()
    gpu_dtype: str = "float32"


def _sharing(interleave_tokens):
    """Return options for two ranks that share the tokens of one KV head."""
    interleave = {"cp_kv_cache_interleave_size": interleave_tokens}
    return {"tp_size": 2, "arguments": {"decode_context_parallel_size": 2, **interleave}}


def _dcp(name, **arguments):
    return Case(name, has_nixl=False, **{"model": {"kv_heads": 1}, **ON_GPUS_BF16, **arguments})


def _both(name, engine, **arguments):
    return Case(name, prefill=engine, decode=engine, **arguments)


def _blocks(size):
    return {"block_size": size}


def _stream(name, **arguments):
    return Case(name, **{"scenario": s.streamed, **arguments}, has_nixl=False)


def _tier(name, scenario=s.from_both, **arguments):
    return Case(name, scenario, **{"found_by": "ranges", **arguments}, has_nixl=False)


def _converted(name, prefill=None, decode=None, needs=()):
    engines = {"prefill": {**BF16, **(prefill or {})}, "decode": {**BF16, **(decode or {})}}
    common = {"model": {"layers": 1}, "has_nixl": False, "gpu_dtype": "bfloat16"}
    return Case(name, s.converted, **engines, **common, needs=needs)


def _sparse(name, kind, layers, **engine):
    """DeepSeek's models with random weights that each engine makes, in caches of fp8."""
    arguments = {
        "load_format": "dummy",
        "max_model_len": 8192,
        "max_num_batched_tokens": 2048,
        "worker_extension_cls": "tests.vllm.harness.sparse_worker.SparseWorker",
        **engine.pop("arguments"),
    }
    engine |= {"arguments": arguments, "cache_bytes": 1 << 30}
    model = {"kind": kind, "layers": layers}
    return _both(name, engine, scenario=s.steps, model=model, has_nixl=False, **ON_GPUS_BF16)


def _servers(name, servers, **arguments):
    return Case(name, servers=servers, has_nixl=False, **arguments)


EXPERTS = "--enable-expert-parallel"
MLA_EXPERTS = f"{EXPERTS} --dtype bfloat16"
# vLLM 0.32's CPU code lacks the collectives of spread experts
DP2 = {"dp_size": 2}
SPREAD = {"needs": ("gpus",), "decode": DP2}
BOTH = ("kv_both", "kv_both")
BOTH_WAYS = {"bidirectional_kv_xfer": True}
BF16 = {"dtype": "bfloat16"}
# on CPUs with AVX-512
FP8, E5M2 = ({"arguments": {"kv_cache_dtype": each}} for each in ("fp8", "fp8_e5m2"))
TP2 = {"tp_size": 2}
PP2 = {"pp_size": 2}
CHUNKED = {"arguments": {"max_num_batched_tokens": 256}}
CHUNKED_UNCACHED = {"arguments": {"max_num_batched_tokens": 256, "enable_prefix_caching": False}}
UNCACHED = {"arguments": {"enable_prefix_caching": False}}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
NGRAM = {"arguments": {"speculative_config": LOOKUP}}
# vLLM 0.32's CPU code has no prefix cache of recurrent states, and loads this model into one pipeline stage only
STATES = {"kind": "states"}
DEEP = {"kv_heads": 8, "layers": 8}
MTP = {"draft": "mtp"}
PACKED = {"environment": {"KVCONNECTOR_PATHS_DIRECT": "never"}}
LATE = {"environment": {"HOST_TIER_POLLS": "200"}}
HND = {"environment": {"VLLM_KV_CACHE_LAYOUT": "HND"}}
SLEEPY = {"arguments": {"enable_sleep_mode": True}}
ON_GPUS_BF16 = {"needs": ("gpus",), "gpu_dtype": "bfloat16"}
MLA = {"model": {"kind": "mla", "layers": 2}, **ON_GPUS_BF16}
LOST = {"policy": "recompute", "leaves_nothing": False}
PACKED_LOST = {**LOST, "options": {"paths": {"direct": "never"}}}
V32 = {"block_size": 64, "arguments": {"kv_cache_dtype": "fp8_ds_mla"}}
V4 = {"block_size": 256, "arguments": {"kv_cache_dtype": "fp8"}}
FIRST_TOKENS = {"scenario": s.first_tokens, "has_nixl": False}
ALWAYS = {"options": {"first_token": "always"}}
PREFIXES = {"scenario": s.prefix_hits}
CASES = (
    Case("tp1-tp1", is_quick=True),
    Case("tp1-tp1-bf16", prefill=BF16, decode=BF16),
    Case("tp2-tp1", prefill=TP2),
    Case("tp1-tp2", decode=TP2),
    Case("block64-128", prefill=_blocks(64), decode=_blocks(128)),
    Case("block128-64", prefill=_blocks(128), decode=_blocks(64)),
    Case("block96-64", prefill=_blocks(96), decode=_blocks(64)),
    Case("tp2-block64-tp1-block128", prefill=TP2 | _blocks(64), decode=_blocks(128), is_quick=True),
    Case("gqa1-tp2-tp1", prefill=TP2, model={"kv_heads": 1}),
    Case("gqa1-tp1-tp2", decode=TP2, model={"kv_heads": 1}),
    Case("pp2-pp1", prefill=PP2),
    Case("pp1-pp2", decode=PP2),
    Case("pp2-pp2", prefill=PP2, decode=PP2),
    Case("pp2-tp2", prefill=PP2, decode=TP2),
    _dcp("dcp1-dcp2", prefill=_blocks(32), decode=_sharing(16)),
    _dcp("dcp2-dcp1", prefill=_sharing(1)),
    _dcp("mla-dcp2-dcp1", prefill=_sharing(1), **MLA),
    _dcp("prefix-hits-dcp2-dcp2", prefill=_sharing(64), decode=_sharing(4), **PREFIXES),
    Case("cache-sizes", prefill={"cache_bytes": 96 << 20}, decode={"cache_bytes": 160 << 20}),
    Case("window", model={"window": 128}),
    Case("window-block64-128", model={"window": 128}, prefill=_blocks(64), decode=_blocks(128)),
    Case("states", model=STATES, prefill=UNCACHED, decode=UNCACHED),
    Case("states-tp2-tp1", model=STATES, prefill=TP2 | UNCACHED, decode=UNCACHED),
    Case("states-tp1-tp2", model=STATES, prefill=UNCACHED, decode=TP2 | UNCACHED),
    Case("mla", **MLA),
    Case("mla-tp1-tp2", decode=TP2, **MLA),
    _both("packed", PACKED, has_nixl=False),
    Case("hnd-nhd", prefill=HND, decode=_blocks(128), **ON_GPUS_BF16),
    _both("graphs", {"arguments": {"enforce_eager": False}}, **ON_GPUS_BF16),
    _both("fp8", FP8, **ON_GPUS_BF16),
    _converted("bf16-fp8", decode=FP8),
    _converted("bf16-fp8-packed", prefill=PACKED, decode={**FP8, **PACKED}),
    _converted(
        "bf16-e5m2-tp2-tp1-block64-128",
        prefill=TP2,
        decode={**E5M2, **_blocks(128)},
        needs=("cpus",),
    ),
    _sparse("deepseek-v3.2", "deepseek-v3.2", 4, **V32),
    _sparse("deepseek-v3.2-packed", "deepseek-v3.2", 4, **V32, **PACKED),
    _sparse("deepseek-v4", "deepseek-v4", 6, **V4),
    _sparse("deepseek-v4-packed", "deepseek-v4", 6, **V4, **PACKED),
    Case("prefix-hits", **PREFIXES),
    Case("prefix-hits-block64-128", prefill=_blocks(64), decode=_blocks(128), **PREFIXES),
    Case("prefix-hits-block128-32", prefill=_blocks(128), decode=_blocks(32), **PREFIXES),
    Case("crowd", s.crowd),
    Case("completions", s.completions),
    Case("first-token", decode=TP2, **FIRST_TOKENS),
    Case("first-token-window", model={"window": 128}, **FIRST_TOKENS, **ALWAYS),
    Case(
        "first-token-states",
        model=STATES,
        prefill=UNCACHED,
        decode=UNCACHED,
        **FIRST_TOKENS,
        **ALWAYS,
    ),
    Case("first-token-never", has_nixl=False, options={"first_token": "never"}),
    Case("chunked-prefill", prefill=CHUNKED, decode=CHUNKED),
    _stream("stream", prefill=CHUNKED),
    _stream(
        "stream-first-token",
        scenario=partial(s.first_tokens, is_streamed=True),
        prefill=CHUNKED,
        decode=TP2,
    ),
    _stream("stream-packed", prefill=CHUNKED, options={"paths": {"direct": "never"}}),
    # a prompt is one step of several megabytes: its first layers are read while the others are computed
    _stream("stream-layers", prefill=TP2, decode={"block_size": 64}, model=DEEP),
    _stream("stream-tp2-pp2", prefill={**CHUNKED, **TP2}, decode=PP2),
    _stream("stream-window", prefill=CHUNKED, model={"window": 128}),
    _stream("stream-states", model=STATES, prefill=CHUNKED_UNCACHED, decode=UNCACHED),
    _stream("stream-mtp", prefill={**CHUNKED, **MTP}, decode=MTP, model={"kind": "mtp"}),
    _stream("stream-mixed-up", scenario=s.mixed_up, prefill=CHUNKED, policy="recompute"),
    _stream("stream-kill", scenario=s.streamed_then_killed, prefill=CHUNKED, **LOST),
    Case("no-prefix-cache", prefill=UNCACHED, decode=UNCACHED),
    Case("ngram", decode=NGRAM),
    _both("draft-model", {"draft": "draft_model"}),
    _both("eagle", {"draft": "eagle"}),
    _both("mtp", MTP, model={"kind": "mtp"}),
    Case("mtp-decode", decode=MTP, model={"kind": "mtp"}, has_nixl=False),
    Case("mtp-prefill", prefill=MTP, model={"kind": "mtp"}, has_nixl=False),
    Case("preemption", s.preempted, decode={"cache_bytes": 66 << 18}),
    _both("sleep", SLEEPY, scenario=s.slept, has_nixl=False, needs=("gpus",)),
    Case("abort", s.abort),
    Case("kill-recompute", s.killed, **LOST),
    Case("kill-fail", s.killed, leaves_nothing=False),
    Case("restart", s.restarted),
    Case("reset", s.reset, policy="recompute", has_nixl=False),
    Case("consumer-gone", s.consumer_gone, options={"kv_lease_duration": 6}, leaves_nothing=False),
    Case(
        "reclaimed",
        s.reclaimed,
        prefill={"cache_bytes": 66 << 18},
        policy="recompute",
        options={"lease": {"reclaim_above": 0.5}, "peer": {"heartbeat_interval_s": 0.5}},
        has_nixl=False,
    ),
    Case("multi", found_by="multi"),
    Case("by-name", found_by="name", has_nixl=False),
    _tier("range-tier"),
    _tier("range-tier-late", decode=LATE),
    _tier("range-tier-tp2-block128", prefill=TP2, decode=_blocks(128)),
    _tier("range-tier-window", model={"window": 128}),
    _tier("range-tier-kill", s.killed_beside_tier, **PACKED_LOST),
    _tier("range-tier-abort", s.aborted_beside_tier, decode=LATE),
    _tier("range-tier-preemption", s.preempted, decode={"cache_bytes": 66 << 18}),
    _tier("tier-first-hit", s.from_tier_alone, found_by="first-hit"),
    Case("both", roles=BOTH),
    Case("chat", s.chat, options=BOTH_WAYS, roles=BOTH, leaves_nothing=False),
    Case(
        "chat-reasoning",
        s.chat_without_reasoning,
        options=BOTH_WAYS,
        roles=BOTH,
        leaves_nothing=False,
        has_nixl=False,
    ),
    _servers("example", http_example),
    _servers("example-dp2", partial(http_example, more="--data-parallel-size 2"), decode=DP2),
    _servers("dp2-dp3", one_address(prefill=2, decode=3), decode={"dp_size": 3}),
    _servers("dp2-dp2-experts", one_address("moe", prefill=2, decode=2, more=EXPERTS), **SPREAD),
    _servers("dp2-dp2-addresses", address_per_rank("moe", size=2, more=EXPERTS), **SPREAD),
    _servers(
        "dp2-dp2-mla", one_address("mla-moe", prefill=2, decode=2, more=MLA_EXPERTS), **SPREAD
    ),
    _servers("encoder", encoder),
    _servers("encoder-tp2", partial(encoder, tp_size=2), decode=TP2),
    _servers("metrics", metrics, is_quick=True),
    _servers("failed-answers", failed_answers),
    _servers("vllm-router", launchers.vllm_router, needs=("vllm_router",)),
    _servers("ray-serve", launchers.ray_serve, needs=("ray",)),
    _servers("ray-serve-nodes", launchers.ray_nodes, needs=("ray", "hosts")),
    _servers("dynamo", launchers.dynamo, needs=("dynamo",)),
)
