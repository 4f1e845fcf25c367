"""The cases, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.mixed.harness import scenarios as s
from tests.mixed.harness.routed import routed
from tests.mixed.harness.soak import soak


@dataclass(frozen=True)
class Case:
    """Two engines and the scenario that drives them.

    `prefill` and `decode` are the kind of an engine, "vllm", "sglang" or "minillm", and its options, as `engines.py`
    passes them on. `servers` runs API servers instead of all this.
    `is_quick`: run for every change. `why_not`: why it cannot run on a CPU.
    """

    name: str
    prefill: tuple
    decode: tuple
    scenario: Callable = s.tokens
    model: dict = field(default_factory=dict)
    environment: dict = field(default_factory=dict)
    servers: Callable | None = None
    is_quick: bool = False
    why_not: str = ""


def why_not(case, device):
    """Return why a case cannot run on a device; "" if it can."""
    if device.kind == "cpu":
        return ""
    sides = case.prefill, case.decode
    if case.servers is not None or any(kind == "minillm" for kind, _ in sides):
        return "it runs on CPUs"
    if case.model.get("kind") == "mla":
        return "vLLM's attention with latents takes no float32 on GPUs"
    wanted = max(options.get("tp_size", options.get("tp", 1)) for _, options in sides)
    found = len(device.units)
    return f"an engine needs {wanted} GPUs, there are {found}" if wanted > found else ""


def vllm(block=64, **options):
    """Return an engine of vLLM with blocks of `block` tokens."""
    return "vllm", {"block_size": block, **options}


def sglang(page=16, **options):
    """Return an engine of SGLang with pages of `page` tokens."""
    return "sglang", {"page-size": page, **options}


RADIX = {"disaggregation-decode-enable-radix-cache": True}


def minillm(block=16, **options):
    """Return an engine of minillm with blocks of `block` tokens."""
    return "minillm", {"block": block, **options}


GQA1 = {"kv_heads": 1}
MHA = {"kv_heads": 8}
MLA = {"kind": "mla"}
PACKED = {"KVCONNECTOR_PATHS_DIRECT": "never"}
SOON = {
    "KVCONNECTOR_LEASE_DURATION_S": "6",
    "KVCONNECTOR_LEASE_EARLY_FOLLOW_S": "6",
    "KVCONNECTOR_PEER_HEARTBEAT_INTERVAL_S": "1",
    "KVCONNECTOR_PEER_TIMEOUT_S": "3",
    "KVCONNECTOR_PEER_HELLO_TIMEOUT_S": "3",
}
"""Deadlines with which a case of loss ends soon."""

CASES = (
    Case("vllm-sglang", vllm(), sglang(), is_quick=True),
    Case("vllm32-sglang64", vllm(32), sglang(64)),
    Case("vllm-sglang-packed", vllm(), sglang(), environment=PACKED),
    Case("vllm-sglang-mha", vllm(), sglang(32), model=MHA),
    Case("vllm-sglang-mla", vllm(), sglang(), model=MLA),
    Case("vllm-tp2-sglang", vllm(tp_size=2), sglang()),
    Case("vllm-sglang-tp2", vllm(), sglang(tp=2)),
    Case("vllm-tp2-sglang-gqa1", vllm(tp_size=2), sglang(), model=GQA1),
    Case("vllm-sglang-crowd", vllm(), sglang(), s.crowd),
    Case("vllm-sglang-prefixes", vllm(), sglang(**RADIX), s.prefix_hits),
    Case("vllm-sglang-mixed-up", vllm(), sglang(), s.mixed_up),
    Case("vllm-sglang-unknown", vllm(), sglang(), s.unknown_elsewhere),
    Case("vllm-sglang-lost", vllm(), sglang(), s.lost_prefill, environment=SOON),
    Case("sglang-vllm", sglang(), vllm(), is_quick=True),
    Case("sglang64-vllm32", sglang(64), vllm(32)),
    Case("sglang-vllm-packed", sglang(), vllm(), environment=PACKED),
    Case("sglang-vllm-mha", sglang(32), vllm(), model=MHA),
    Case("sglang-vllm-mla", sglang(), vllm(), model=MLA),
    Case("sglang-tp2-vllm", sglang(tp=2), vllm()),
    Case("sglang-vllm-tp2", sglang(), vllm(tp_size=2)),
    Case("sglang-vllm-tp2-gqa1", sglang(), vllm(tp_size=2), model=GQA1),
    Case("sglang-vllm-crowd", sglang(), vllm(), s.crowd),
    Case("sglang-vllm-prefixes", sglang(), vllm(), s.prefix_hits),
    Case("sglang-vllm-mixed-up", sglang(), vllm(), s.mixed_up),
    Case("sglang-vllm-lost", sglang(), vllm(), s.lost_prefill, environment=SOON),
    Case("router-vllm-sglang", vllm(), sglang(), servers=routed("vllm", "sglang")),
    Case("router-sglang-vllm", sglang(), vllm(), servers=routed("sglang", "vllm")),
    Case("soak", vllm(), sglang(), servers=soak(SOON)),
    Case("minillm-sglang", minillm(), sglang()),
    Case("sglang-minillm", sglang(), minillm()),
    Case("minillm-vllm", minillm(), vllm()),
    Case("vllm-minillm", vllm(), minillm(32)),
)
