"""The cores or GPUs of this host on which a case's engines run."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cached_property

PIPELINE_WORKER = "tests.vllm.harness.pipeline_worker.PipelineCPUWorker"
MEMORY_SHARE = 0.04
"""Share of a GPU's memory for one engine: the engines of several cases share a GPU."""
EXACT = {"TRITON_F32_DEFAULT": "ieee", "NVIDIA_TF32_OVERRIDE": "0"}
"""Exact float32: with TF32 one engine and two engines would round differently and so give different tokens."""


@dataclass(frozen=True)
class Device:
    """`kind`: "cpu" or "cuda"; `first`: the unit to begin with."""

    kind: str
    first: int = 0

    @cached_property
    def _gpus(self):
        # not by torch: the engines are forked from this process, which must not touch CUDA
        if self.kind == "cpu" or shutil.which("nvidia-smi") is None:
            return []
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.check_output(query, text=True).splitlines()

    @property
    def units(self):
        """Return the names of the cores or GPUs, as vLLM takes them."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if self.kind == "cuda" and visible is not None:
            return [unit for unit in visible.split(",") if unit]
        number = (os.cpu_count() or 1) if self.kind == "cpu" else len(self._gpus)
        return [str(unit) for unit in range(number)]

    @property
    def name(self):
        return f"{len(self.units)} x {self._gpus[0]}" if self._gpus else self.kind

    def environment(self, first, world_size):
        """Variables of an engine whose ranks are on the units from `first` on; after the last comes the first."""
        first += self.first
        units = [self.units[(first + rank) % len(self.units)] for rank in range(world_size)]
        if self.kind == "cpu":
            return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(units)}
        return {"CUDA_VISIBLE_DEVICES": ",".join(units)}

    def arguments(self, *, is_pipeline):
        if self.kind == "cuda":
            return {"gpu_memory_utilization": MEMORY_SHARE, "disable_custom_all_reduce": True}
        return {"worker_cls": PIPELINE_WORKER} if is_pipeline else {}
