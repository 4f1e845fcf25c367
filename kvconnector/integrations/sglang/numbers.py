"""What the elements of SGLang's K and V are: their type, their scale, and the rule by which they are stored.

A pool stores fp8 by `set_kv_buffer`: it divides by the layer's scale in the model's type, and casts. How torch casts
depends on its release and on the device, so every number is cast once to see. `KVArgs` does not list scales. If the
checkpoint has none, a layer's scale is missing or 1, and nothing is rounded before the cast. Otherwise we state no
scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvconnector.integrations.fp8_rules import every_number, rule_of
from kvconnector.topology.geometry import FP8_ELEMENTS, ROUNDINGS, UNKNOWN_ROUNDING

ELEMENTS = {
    "float16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Types of elements by SGLang's names of types for a cache. On ROCm its fp8 is another one."""
CASTING_BACKENDS = frozenset({"torch_native", "fa3", "flashinfer", "triton", "intel_amx"})
"""Attention backends that store all K and V by `set_kv_buffer`. Others have kernels of their own for fp8."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """`element` and `rounding` as in `PartGeometry`; `has_unit_scale`: every layer's scale is 1, or it has none."""

    element: str = ""
    rounding: str = ROUNDINGS[0]
    has_unit_scale: bool = False


BYTES = Numbers()
"""Elements that are moved as they are."""


def numbers_of_pool(
    dtype: str, *, device: str, backends: tuple[str, ...], has_latent: bool, is_scaled: bool
) -> Numbers:
    """Return what the elements of a pool of K and V are.

    Args:
        dtype: SGLang's name of the pool's type.
        device: Where the pool is.
        backends: The attention backends of prefill and of decoding.
        has_latent: Its vectors are latents, which have a kernel of their own for fp8.
        is_scaled: The checkpoint may have scales.
    """
    element = ELEMENTS.get(dtype, "")
    if element not in FP8_ELEMENTS:
        return Numbers(element)
    if torch.version.hip:
        return BYTES
    rounding = UNKNOWN_ROUNDING
    if not has_latent and {*backends} <= CASTING_BACKENDS:
        rounding = rule_of_cast(element, device)
    return Numbers(element, rounding, not is_scaled)


def rule_of_cast(element: str, device: str) -> str:
    """Return the rule by which torch casts bf16 to fp8 on a device."""
    numbers = every_number(torch.bfloat16, 64)
    cast = numbers.to(device).to(getattr(torch, element)).view(torch.uint8)
    return rule_of([cast.cpu().numpy()[None]], [[1.0]], numbers, element)
