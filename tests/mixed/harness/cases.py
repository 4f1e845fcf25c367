"""The cases, by name."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.mixed.harness import scenarios as s
from tests.mixed.harness.routed import routed


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


def vllm(block=64, **options):
    """Return an engine of vLLM with blocks of so many tokens."""
    return "vllm", {"block_size": block, **options}


def sglang(page=16, **options):
    """Return an engine of SGLang with pages of so many tokens."""
    return "sglang", {"page-size": page, **options}


def minillm(block=16, **options):
    """Return an engine of minillm with blocks of so many tokens."""
    return "minillm", {"block": block, **options}


MLA = {"kind": "mla"}

CASES = (
    Case("vllm-sglang", vllm(), sglang(), is_quick=True),
    Case("vllm-sglang-tp2", vllm(), sglang(tp=2)),
    Case("vllm-sglang-mla", vllm(), sglang(), model=MLA),
    Case("vllm-sglang-mixed-up", vllm(), sglang(), s.mixed_up),
    Case("vllm-sglang-unknown", vllm(), sglang(), s.unknown_elsewhere),
    Case("router-vllm-sglang", vllm(), sglang(), servers=routed("vllm", "sglang")),
    Case("sglang-vllm", sglang(), vllm(), is_quick=True),
    Case("sglang-vllm-tp2", sglang(), vllm(tp_size=2)),
    Case("sglang-vllm-mla", sglang(), vllm(), model=MLA),
    Case("minillm-sglang", minillm(), sglang()),
    Case("sglang-minillm", sglang(), minillm()),
    Case("minillm-vllm", minillm(), vllm()),
    Case("vllm-minillm", vllm(), minillm(32)),
)
