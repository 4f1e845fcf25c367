"""vLLM's slot mapping kernel, run by Triton's interpreter: vLLM's CPU code knows no context parallelism."""

import types
from functools import lru_cache

import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from vllm.triton_utils import dispatcher
from vllm.v1.worker.block_table import ComputeSlotMappingKernel

from kvconnector.cache.slot_mapping import PAD_SLOT_ID

SLOT_MAPPING_KERNEL = "vllm.v1.worker.block_table.ComputeSlotMappingKernel.kernel"
KERNEL_TOKENS = 64


@lru_cache
def _interpreted(kernel):
    """A kernel's source with the real Triton, in whose place vLLM has a dummy where there is no GPU."""
    source = getattr(kernel, "fn", kernel)
    names = {**source.__globals__, "tl": tl, "triton": triton}
    function = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)
    function.__module__, function.__qualname__ = source.__module__, source.__qualname__
    return InterpretedFunction(function)


def _v1_kernel():
    here = ComputeSlotMappingKernel.kernel, None
    # in whose place vLLM may have registered one for this platform
    kernel, _ = dispatcher._registry.get(SLOT_MAPPING_KERNEL, here)
    return _interpreted(kernel)


def v1_slots(block_ids, num_tokens, geometry):
    """The slots of a request's first tokens on one rank, in blocks of vLLM's; -1 where another rank has the token. By
    vLLM's V1 model runner.
    """
    shared = geometry.context_parallel
    table = torch.tensor([list(block_ids)], dtype=torch.int32)
    slots = torch.full((num_tokens,), PAD_SLOT_ID - 1, dtype=torch.int64)
    _v1_kernel()[(2,)](
        num_tokens,
        num_tokens,
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.arange(num_tokens, dtype=torch.int64),
        table,
        table.stride(0),
        slots,
        KV_CACHE_BLOCK_SIZE=geometry.block_size,
        TOTAL_CP_WORLD_SIZE=shared.world_size,
        TOTAL_CP_RANK=shared.rank,
        CP_KV_CACHE_INTERLEAVE_SIZE=shared.interleave_tokens,
        PAD_ID=PAD_SLOT_ID,
        BLOCK_SIZE=KERNEL_TOKENS,
    )
    return slots.tolist()
