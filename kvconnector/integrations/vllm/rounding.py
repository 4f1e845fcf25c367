"""Finds the rule by which a layer stores fp8, by letting vLLM's own kernel store every number of its model's type.

Kernels differ: CUDA's round to nearest, the CPU's drops digits, Triton's divides approximately, and each may change
with a release. What a layer's backend has stored in a block of our own is compared with what each rule of
docs/conversion.md makes of the same numbers, with the layer's scales. If no rule fits, nothing is converted for it.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvconnector.integrations.fp8_rules import every_number, rule_of
from kvconnector.integrations.vllm.parts import LayerCache, TpSplit, attention_parts
from kvconnector.layout import KVView
from kvconnector.topology.geometry import ELEMENTS, FP8_ELEMENTS, ROUNDINGS, UNKNOWN_ROUNDING

logger = logging.getLogger(__name__)

_FP8_NAMES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""vLLM's names of types for a cache."""
PLAIN_BYTES, FNUZ_BYTES = "bytes", "fnuz_bytes"
"""What packed caches state as their type, and any cache of bytes on GPUs whose fp8 is `float8_e4m3fnuz`."""


def element_of(layer: Any, spec: Any, tensor: torch.Tensor, kv_cache_dtype: str) -> str:
    """Return the type of an attention layer's elements as `PartGeometry.element`; "" if they have more than a byte and
    are no plain numbers. Some GPUs of AMD have an fp8 of their own, so that a byte is another number there, alone or
    packed with others.
    """
    from vllm.platforms import current_platform
    from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

    if not isinstance(spec, AttentionSpec):
        return ""
    if tensor.element_size() == 1 and current_platform.is_fp8_fnuz():
        return FNUZ_BYTES
    if spec.state_content_bytes is not None:
        return PLAIN_BYTES if tensor.element_size() == 1 else ""
    if spec.kv_quant_mode is KVQuantMode.FP8_PER_TENSOR:
        return _FP8_NAMES.get(str(getattr(layer, "kv_cache_dtype", kv_cache_dtype)), "")
    name = str(tensor.dtype).removeprefix("torch.")
    if tensor.element_size() == 1:
        return PLAIN_BYTES
    return name if spec.kv_quant_mode is KVQuantMode.NONE and name in ELEMENTS else ""


class Rules:
    """The rules of layers, each kind of layer looked at once. `dtype` is the type in which the model computes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._source = torch.float16 if dtype == torch.float16 else torch.bfloat16
        self._dtype = dtype
        self._found: dict[object, str] = {}

    def rule_of(self, layer: Any, cache: LayerCache) -> str:
        """Return the rule by which a layer stores fp8, as `PartGeometry.rounding`."""
        if cache.element not in FP8_ELEMENTS:
            return ROUNDINGS[0]
        tensor = cache.tensor
        kind = (
            type(getattr(layer, "impl", None)),
            cache.backend,
            cache.isa,
            cache.element,
            cache.scales,
        )
        key = *kind, tensor.shape[1:], tensor.stride(), tensor.device
        if key not in self._found:
            self._found[key] = self._look(layer, cache)
        return self._found[key]

    def _look(self, layer: Any, cache: LayerCache) -> str:
        try:
            stored = self._stored(layer, cache)
        except Exception as error:
            logger.info("caches of %s are not converted to: %r", cache.name, error)
            return UNKNOWN_ROUNDING
        # tiles of tokens are more parts, in an order that is not known here
        numbers = every_number(self._source, cache.spec.head_size)
        rule = rule_of(stored, cache.scales, numbers, cache.element)
        if rule == UNKNOWN_ROUNDING:
            logger.info("caches of %s are not converted to: no known rule", cache.name)
        return rule

    def _stored(self, layer: Any, cache: LayerCache) -> list[npt.NDArray[np.uint8]]:
        """Let the layer's backend store all numbers, as K and as V of each head. Returns both, `[head, token, dim]`."""
        head_dim, (_, heads, block_size, _) = cache.spec.head_size, cache.tensor.shape
        numbers = every_number(self._source, head_dim).to(self._dtype)
        tokens = len(numbers)
        blocks = _blocks_like(cache.tensor, -(-tokens // block_size))
        every = numbers.unsqueeze(1).expand(tokens, heads, head_dim)
        key, value = (every.contiguous().to(blocks.device) for _ in "kv")
        slots = torch.arange(tokens, dtype=torch.int64, device=blocks.device)
        layer.impl.do_kv_cache_update(layer, key, value, blocks, slots)
        ours = replace(cache, tensor=blocks, total_kv_heads=heads)
        parts = attention_parts(ours, TpSplit(0, 1), block_size)
        return [_read(blocks, view)[:, :tokens] for _, view in parts]


def _blocks_like(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return `count` empty blocks with axes in memory in the order of a cache tensor's."""
    axes = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    sizes = [count, *tensor.shape[1:]]
    dense = torch.zeros([sizes[axis] for axis in axes], dtype=tensor.dtype, device=tensor.device)
    return dense.permute([axes.index(axis) for axis in range(tensor.dim())])


def _read(blocks: torch.Tensor, view: KVView) -> npt.NDArray[np.uint8]:
    """Return a part of one-byte elements, `[head, token, dim]`."""
    raw = torch.empty(0, dtype=torch.uint8, device=blocks.device)
    raw.set_(blocks.untyped_storage())
    at = view.address - raw.data_ptr()
    rows = raw.as_strided(view.shape, view.strides_bytes, at).permute(1, 0, 2, 3)
    return rows.reshape(view.shape[1], -1, view.shape[3]).cpu().numpy()
