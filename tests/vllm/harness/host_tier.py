"""A tier for vLLM's `OffloadingConnector` on CPUs.

The connector, its scheduler and manager are vLLM's own. vLLM copies blocks to host memory only on GPUs, so this worker
does, at once. It reports a load `HOST_TIER_POLLS` polls later, so that another connector's may end before it.
"""

import os
from itertools import pairwise

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostTierSpec(CPUOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches):
        polls = int(os.environ.get("HOST_TIER_POLLS", "0"))
        return HostTierWorker(kv_caches, self.num_chunks, polls)


class HostTierWorker(OffloadingWorker):  # type: ignore[misc]
    """A worker whose chunks have one block each."""

    def __init__(self, kv_caches, num_chunks, polls):
        engine = [each.tensor for each in kv_caches.tensors]
        tier = [torch.empty((num_chunks, each.shape[1]), dtype=each.dtype) for each in engine]
        self._groups = [
            [(engine[ref.tensor_idx], tier[ref.tensor_idx]) for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._polls = polls
        self._ended = []

    def submit_store(self, job_id, src_spec, dst_spec):
        for in_engine, in_tier, pages, host_pages in self._copies(src_spec, dst_spec):
            host_pages[in_tier] = pages[in_engine]
        self._ended.append([0, job_id])
        return True

    def submit_load(self, job_id, src_spec, dst_spec):
        for in_engine, in_tier, pages, host_pages in self._copies(dst_spec, src_spec):
            pages[in_engine] = host_pages[in_tier]
        self._ended.append([self._polls, job_id])
        return True

    def _copies(self, engine, tier):
        """Yield blocks, chunks and both tensors, for each layer."""
        stops = [sum(engine.group_sizes[:number]) for number in range(len(engine.group_sizes) + 1)]
        for layers, (start, stop) in zip(self._groups, pairwise(stops), strict=True):
            blocks, chunks = (torch.tensor(each.block_ids[start:stop]) for each in (engine, tier))
            for pages, host_pages in layers:
                yield blocks, chunks, pages, host_pages

    def get_finished(self):
        ended = [job_id for polls, job_id in self._ended if not polls]
        self._ended = [[polls - 1, job_id] for polls, job_id in self._ended if polls]
        return [TransferResult(job_id, success=True) for job_id in ended]

    def wait(self, job_ids):
        """Do nothing: every copy is made when it is submitted."""
