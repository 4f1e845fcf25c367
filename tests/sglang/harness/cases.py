"""The cases, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tests.hosts.network import missing as why_no_hosts
from tests.sglang.harness import faults, launchers
from tests.sglang.harness import scenarios as s


@dataclass(frozen=True)
class Case:
    """Two engines and the scenario that drives them.

    `prefill` and `decode` are options of `sglang.launch_server`. `is_quick`: run for every change. `is_ours`: it needs
    settings or errors of ours, or transfers that SGLang's backends lack. `why_not`: why it cannot run on a CPU.
    `servers` starts engines itself, on a CPU, in place of all this. `nodes`: how many hosts of
    its own each side has.
    """

    name: str
    scenario: Callable = s.tokens
    prefill: dict = field(default_factory=dict)
    decode: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    is_quick: bool = False
    is_ours: bool = False
    why_not: str = ""
    servers: Callable | None = None
    nodes: dict = field(default_factory=dict)


def _page(size):
    return {"page-size": size}


RADIX = {"disaggregation-decode-enable-radix-cache": True}
TP2 = {"tp": 2}
PP2 = {"pp-size": 2}
CP2 = {"tp": 2, "attn-cp-size": 2, "enable-prefill-cp": True, "cp-strategy": "zigzag"}
INTERLEAVED = CP2 | {"cp-strategy": "interleave"}
SPLIT = INTERLEAVED | {"enable-dsa-cache-layer-split": True}
GQA1 = {"kv_heads": 1}
WINDOW = {"window": 64}
MLA = {"kind": "mla"}
MLA_MOE = {"kind": "mla-moe"}
SPARSE = {"kind": "sparse"}
STATES = {"kind": "states"}
MTP = {"kind": "mtp"}
IMAGES = {"kind": "images"}
UNCACHED = {"disable-radix-cache": True}
SMALL = {"max-total-tokens": 480, "num-reserved-decode-tokens": 16}  # for one answer of 200
ONE = {"max-total-tokens": 400, "num-reserved-decode-tokens": 16}
"""For one prompt of 300 tokens."""
FEW = {"max-total-tokens": 1200}
"""For a few prompts: what is cached makes room for new ones."""
LORA = {
    "enable-lora": True,
    "max-lora-rank": 4,
    "lora-target-modules": "all",
    "lora-backend": "torch_native",
}
KEYED = {"api-key": "k"}
METRICS = {"enable-metrics": True}
ZEROS = "where there are more ranks than KV heads, SGLang on a CPU adds heads of zeros: refused at the start"
PACKED = {"KVCONNECTOR_PATHS_DIRECT": "never"}
DPA2 = {"tp": 2, "dp-size": 2, "enable-dp-attention": True, "enable-dp-lm-head": True}
DPA4 = {**DPA2, "tp": 4, "dp-size": 4, "max-running-requests": 8}
DP2 = {"dp-size": 2}
DECODE_GRAPHS = {"cuda-graph-backend-decode": "full", "decode-log-interval": 1}
PREFILL_GRAPHS = {"cuda-graph-backend-prefill": "breakable"}
ROBIN = {"load-balance-method": "round_robin"}
TOTAL = {"load-balance-method": "total_tokens"}


def _ours(name, *arguments, **options):
    return Case(name, *arguments, **{"is_ours": True, **options})


def _lost(name, scenario, **options):
    return _ours(name, scenario, environment=s.SOON, **options)


def _attention(name, scenario=s.crowd, **options):
    return _ours(name, scenario, model=MLA, **options)


def _timed(name, **options):
    return Case(name, s.times, why_not="its times mean something on GPUs only", **options)


def _graphs(name, **options):
    return Case(name, s.graphs, why_not="a CPU has no CUDA graphs", **options)


def _sparse(name, scenario=s.tokens, *, prefill=(), decode=()):
    sides = [_page(64) | dict(each) for each in (prefill, decode)]
    return _ours(name, scenario, model=SPARSE, prefill=sides[0], decode=sides[1])


KILL_PREFILL = partial(s.kill, side="prefill", other="decode")
LOST_PREFILL = partial(s.lost_node, side="prefill", other="decode")
LOST_DECODE = partial(s.lost_node, side="decode", other="prefill")
KILL_DECODE = partial(s.kill, side="decode", other="prefill")
DATA_PARALLEL = (
    _attention("dpa2-tp1", prefill=DPA2),
    _attention("tp1-dpa2", decode=DPA2),
    _attention("dpa2-dpa2", prefill=DPA2, decode=DPA2),
    _attention("dpa2-robin-tp2", prefill=DPA2 | ROBIN, decode=TP2),
    _attention("dpa2-robin-dpa2", prefill=DPA2 | ROBIN, decode=DPA2),
    _attention("dpa2-total-tp1", prefill=DPA2 | TOTAL),
    _attention("dpa2-total-dpa2", prefill=DPA2 | TOTAL, decode=DPA2),
    _attention("dpa2-total-dpa4", prefill=DPA2 | TOTAL, decode=DPA4),
    _timed("dpa2-dpa2-times", model=MLA, prefill=DPA2 | TOTAL, decode=DPA2),
    _timed("dpa2-dpa4-times", model=MLA, prefill=DPA2 | TOTAL, decode=DPA4),
    _ours("dpa2-moe", s.crowd, model=MLA_MOE, prefill=DPA2, decode=DPA2),
    _attention("dpa2-named-tp1", s.named, prefill=DPA2),
    _attention("dpa2-against-room", s.against_room, environment=s.SOON, prefill=DPA2),
    _attention("dpa2-robin-late-prefill", s.late_prefill, prefill=DPA2 | ROBIN),
    _ours("dp2-tp1", s.crowd, prefill=DP2),
    _ours("tp1-dp2", s.crowd, decode=DP2),
    _ours("dp2-robin-dp2", s.crowd, prefill=DP2 | ROBIN, decode=DP2),
    _ours("dp2-total-dp2", s.crowd, prefill=DP2 | TOTAL, decode=DP2),
    _ours("dp2-named-tp1", s.named, prefill=DP2),
    _ours("dp2-late-prefill", s.late_prefill, prefill=DP2),
    _ours("dp2-states", s.crowd, model=STATES, prefill=UNCACHED | DP2, decode=UNCACHED),
    _ours("dp2-window", s.crowd, model=WINDOW, prefill=DP2, decode=_page(64)),
    _ours("dp2-pp2", s.crowd, prefill=DP2 | PP2),
    _attention("dpa2-pp2", prefill=DPA2 | PP2),
    _attention("dpa2-keys", s.keys, environment=s.SOON, prefill=DPA2),
    _lost("dpa2-restart-prefill", s.restart_prefill, model=MLA, prefill=DPA2),
    _lost("dpa2-restart-decode", s.restart_decode, model=MLA, decode=DPA2),
    _lost("dp2-robin-restart-prefill", s.restart_prefill, prefill=DP2 | ROBIN),
    _lost("dpa2-registry-down", s.registry_down, model=MLA, prefill=DPA2),
    _lost("dpa2-steps-at-a-loss", s.steps_at_a_loss, model=MLA, prefill=DPA2, decode=DPA2),
    _lost(
        "dpa2-steps-at-a-silence",
        partial(s.steps_at_a_loss, dies=False),
        model=MLA,
        prefill=DPA2,
        decode=DPA2,
    ),
    _lost("dpa2-kill-prefill", KILL_PREFILL, model=MLA, prefill=DPA2),
    _lost("dpa2-kill-decode", KILL_DECODE, model=MLA, prefill=DPA2, decode=DPA2),
    _lost("dpa2-abort", s.abort, model=MLA, prefill=DPA2, decode=DPA2),
)
"""Servers whose attention, or all of them, runs in data-parallel ranks."""


def _nodes(name, at_prefill, at_decode, scenario=s.tokens_on_nodes, environment=(), **options):
    return _ours(
        name,
        scenario,
        nodes={"prefill": at_prefill, "decode": at_decode},
        environment={"GLOO_SOCKET_IFNAME": "eth0", **dict(environment)},
        why_not=why_no_hosts() or "",
        **options,
    )


NODES = (
    _nodes("two-nodes-tp1", 2, 1, prefill=TP2),
    _nodes("tp1-two-nodes", 1, 2, decode=TP2),
    _nodes("two-nodes-pp2", 2, 1, prefill=PP2),
    _nodes("two-nodes-dpa2-dpa2", 2, 2, s.crowd, model=MLA, prefill=DPA2, decode=DPA2),
    _nodes("two-nodes-lost", 2, 1, LOST_PREFILL, environment=s.SOON, prefill=TP2),
    _nodes("tp1-two-nodes-lost", 1, 2, LOST_DECODE, environment=s.SOON, decode=TP2),
)
"""Engines whose ranks are on several hosts, with an engine on others."""


CASES = (
    Case("tp1-tp1", is_quick=True),
    Case("page32", prefill=_page(32), decode=_page(32)),
    Case("page64", prefill=_page(64), decode=_page(64)),
    _ours("page16-64", prefill=_page(16), decode=_page(64), is_quick=True),
    _ours("page64-16", prefill=_page(64), decode=_page(16)),
    _ours("page32-48", prefill=_page(32), decode=_page(48)),
    _ours("page1-16", prefill=_page(1), decode=_page(16)),
    Case("tp2-tp1", prefill=TP2),
    Case("tp1-tp2", decode=TP2),
    Case("tp2-tp2", prefill=TP2, decode=TP2),
    _ours("tp2-page16-tp1-page64", prefill=TP2 | _page(16), decode=_page(64)),
    Case("gqa1-tp2-tp1", prefill=TP2, model=GQA1, why_not=ZEROS),
    Case("gqa1-tp1-tp2", decode=TP2, model=GQA1),
    Case("pp2-pp1", prefill=PP2),
    _ours("pp1-pp2", decode=PP2),
    _ours("pp1-pp2-failing", s.failing_stages, decode=PP2 | ONE, environment=faults.IN_STAGES),
    _attention("cp2-tp1", s.split_prompts, prefill=CP2),
    _attention("cp2-tp2", s.split_prompts, prefill=CP2, decode=TP2),
    _attention("cp2-hits-page16-64", s.prefix_hits, prefill=CP2, decode=RADIX | _page(64)),
    _sparse("sparse"),
    _sparse("cp2-interleaved-tp2", s.split_prompts, prefill=INTERLEAVED, decode=TP2),
    _sparse("cp2-split-tp1", s.split_layers, prefill=SPLIT),
    _sparse("cp2-split-tp2", s.split_layers, prefill=SPLIT, decode=TP2),
    _sparse("cp2-split-pp2", s.split_layers, prefill=SPLIT, decode=PP2),
    _sparse("cp2-split-hits", s.prefix_hits, prefill=SPLIT, decode=RADIX),
    _ours("packed", environment=PACKED),
    _ours("packed-page16-64", decode=_page(64), environment=PACKED),
    Case("window", model=WINDOW),
    _ours("window-page16-64", model=WINDOW, decode=_page(64)),
    Case("mla", model=MLA),
    _ours("mla-tp1-tp2", model=MLA, decode=TP2),
    Case("states", model=STATES, prefill=UNCACHED, decode=UNCACHED),
    _ours("states-tp1-tp2", model=STATES, prefill=UNCACHED, decode=UNCACHED | TP2),
    _ours("states-tp2-tp1", model=STATES, prefill=UNCACHED | TP2, decode=UNCACHED),
    _ours("mtp-decode", s.drafts, model=MTP, decode=s.DRAFTS),
    _ours("mtp-both", s.drafts, model=MTP, prefill=s.DRAFTS, decode=s.DRAFTS),
    _graphs("graphs", decode=DECODE_GRAPHS),
    _graphs("graphs-both", prefill=PREFILL_GRAPHS, decode=DECODE_GRAPHS),
    Case("prefix-hits", s.prefix_hits, decode=RADIX),
    _ours("prefix-hits-page16-64", s.prefix_hits, decode=RADIX | _page(64)),
    _ours("window-hits", s.window_hits, model=WINDOW, decode=RADIX),
    _ours(
        "window-hits-page32-64",
        s.window_hits,
        model=WINDOW,
        prefill=_page(32),
        decode=RADIX | _page(64),
    ),
    _ours("window-hits-tp1-tp2", s.window_hits, model=WINDOW, decode=RADIX | TP2),
    _ours("window-hits-evicted", s.window_hits, model=WINDOW, decode=RADIX | FEW),
    Case("crowd", s.crowd, is_quick=True),
    _ours("crossed", s.crossed, prefill=ONE, decode=ONE),
    _ours("mixed-up", s.mixed_up),
    _ours("adapters", s.adapters, prefill=LORA, decode=LORA),
    _ours("weights", s.weights),
    _ours("images", s.images, model=IMAGES),
    _ours("images-hits-page16-64", s.images, model=IMAGES, decode=RADIX | _page(64)),
    _ours("images-tp1-tp2", s.images, model=IMAGES, decode=TP2),
    _ours("malformed", s.malformed),
    Case("retraction", s.retraction, decode=SMALL),
    _ours("recomputed", s.recomputed),
    _ours("recomputed-tp2", s.recomputed, decode=TP2),
    _ours("recomputed-key", s.recomputed, prefill=KEYED, decode=KEYED),
    _ours("metrics", s.metrics, prefill=METRICS | TP2, decode=METRICS),
    _ours("spans", s.spans),
    Case("logprobs", s.logprobs),
    Case("times", s.times),
    _lost("abort", s.abort),
    _lost("kill-prefill", KILL_PREFILL),
    _lost("restart-prefill", s.restart_prefill),
    _lost("kill-decode", KILL_DECODE),
    _lost("lost-router", s.lost_router),
    _ours("keys", s.keys, environment=s.SOON),
    *DATA_PARALLEL,
    *NODES,
    _ours("dynamo", servers=launchers.dynamo, why_not=launchers.why_not()),
)
