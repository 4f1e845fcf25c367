"""What a case's engines run on: this host's cores, or its GPUs, which all engines of a case share.

On a GPU the engines compute with PyTorch and Triton alone: attention with SGLang's Triton kernels, everything else with
its plain forms. So a stand-in for its compiled kernels is enough, as on a CPU, and tokens are exact.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

from tests.vllm.harness.device import EXACT
from tests.vllm.harness.device import Device as Units

OPTIONS = {
    "cpu": {
        "device": "cpu",
        "attention-backend": "torch_native",
        "disable-overlap-schedule": True,
    },
    "cuda": {
        "device": "cuda",
        "attention-backend": "triton",
        "sampling-backend": "pytorch",
        "cuda-graph-backend-decode": "disabled",
        "cuda-graph-backend-prefill": "disabled",
        "disable-custom-all-reduce": True,  # one of the compiled kernels: NCCL has another
    },
}
ENVIRONMENT = {
    "cpu": {"SGLANG_USE_CPU_ENGINE": "1"},
    "cuda": {
        "SGLANG_FORCE_FUSED_OP_BACKEND": "torch",
        "TORCHDYNAMO_DISABLE": "1",  # compiles nothing, for minutes
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",  # its Rust form is built for one release of torch
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asks for a GPU without using it
        **EXACT,
    },
}
PROPERTIES = ("name", "major", "minor", "total_memory", "multi_processor_count")
PROBE = f"""
import json, torch
found = torch.cuda.get_device_properties(0)
print(json.dumps({{name: getattr(found, name) for name in {PROPERTIES}}}))
"""


@dataclass(frozen=True)
class Device:
    """`kind`: "cpu" or "cuda". `more`: options of all engines, of `sglang.launch_server`, by name."""

    kind: str = "cpu"
    more: dict = field(default_factory=dict)

    @property
    def options(self):
        """Return the options that an engine on this device needs."""
        return {**OPTIONS[self.kind], **self.more}

    @property
    def name(self):
        return Units(self.kind).name

    def why_not(self, case):
        """Return why a case cannot run here; "" if it can."""
        if self.kind == "cpu":
            return case.why_not
        if case.servers is not None or case.nodes:
            return "it runs on CPUs"
        wanted, found = max(map(ranks_of, (case.prefill, case.decode))), len(Units("cuda").units)
        return f"it needs {wanted} GPUs, here are {found}" if wanted > found else ""

    def prepare(self):
        """Set up this process, before it imports SGLang. Nothing here may use CUDA: engines are forked from it."""
        os.environ |= ENVIRONMENT[self.kind]
        if self.kind == "cuda":
            answer_for_cuda()


CPU = Device()


def ranks_of(options):
    """Return how many ranks an engine with these options has."""
    ranks = int(options.get("tp", 1)) * int(options.get("pp-size", 1))
    return ranks if "enable-dp-attention" in options else ranks * int(options.get("dp-size", 1))


def answer_for_cuda():
    """Have torch say what kind of GPU there is without using CUDA, in every process that has not used it yet. SGLang
    asks at its import, and a process that has used CUDA cannot fork others that do.
    """
    import torch

    found = json.loads(subprocess.check_output([sys.executable, "-c", PROBE], text=True))
    known = SimpleNamespace(**found)

    def unless_used(name, answer):
        original = getattr(torch.cuda, name)

        def call(*arguments, **options):
            return original(*arguments, **options) if torch.cuda.is_initialized() else answer

        setattr(torch.cuda, name, call)

    unless_used("get_device_properties", known)
    unless_used("get_device_capability", (known.major, known.minor))
    unless_used("get_device_name", known.name)
    unless_used("current_device", 0)
