"""A kernel that stores an indexer's keys with a function of vLLM's fused kernels. Triton needs a file for it."""
# ruff: noqa: PLR0917  kernels have positional arguments

from vllm.models.deepseek_v32.common import kernels
from vllm.triton_utils import tl, triton

_fp8_quant_and_cache_write = kernels._fp8_quant_and_cache_write

if "MX_SCALE" in _fp8_quant_and_cache_write.arg_names:  # vLLM 0.33

    @triton.jit
    def _write(key, mask, slot, values, scales, rows, nbytes, at):
        _fp8_quant_and_cache_write(
            key,
            mask,
            slot,
            values,
            scales,
            rows,
            nbytes,
            at,
            128,
            False,
            16,
            16,
            False,
            448.0,
            False,
        )

else:

    @triton.jit
    def _write(key, mask, slot, values, scales, rows, nbytes, at):
        _fp8_quant_and_cache_write(
            key, mask, slot, values, scales, rows, nbytes, at, 128, False, 16, 16, 448.0, False
        )


@triton.jit
def store_rows(keys, slots, values, scales, page_bytes, page_rows):
    row = tl.program_id(0)
    at = tl.arange(0, 128)
    key = tl.load(keys + row * 128 + at).to(tl.float32)
    _write(key, at < 128, tl.load(slots + row), values, scales, page_rows, page_bytes, at)
