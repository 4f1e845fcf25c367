"""Elements that change type while they are copied, see kernels/native/convert.c for the arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvconnector_kernels.relayout.checks import RelayoutError, check_device

if TYPE_CHECKING:
    import torch

ELEMENT_TYPES = {"float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}
"""Element types by torch's names, and their numbers in kvc.h."""
ROUNDINGS = {"nearest": 0, "truncated": 1, "cast": 2}
"""Rules by which fp8 stores a value, and their numbers in kvc.h; kernels/native/convert.c says what each does."""
_WIDE = frozenset({"float16", "bfloat16"})


def is_scaled(element: str) -> bool:
    """Return True if an element's number is multiplied by a scale to get its value."""
    return element not in _WIDE


def element_bytes(element: str) -> int:
    """Return the bytes of an element. Raises RelayoutError: the type is unknown."""
    if element not in ELEMENT_TYPES:
        raise RelayoutError(f"no numbers of {element!r} are known, only {', '.join(ELEMENT_TYPES)}")
    return 2 if element in _WIDE else 1


class Conversion:
    """From elements of one type to another, or to fp8 of other scales.

    `scales` is float32 `[num_parts, num_heads, 2]`: the source's scale and the destination's, for every row of the
    paged destination's table, or of the source's where the destination is a chunk, and for every head of the copy. A
    scale of a type that has none is not looked at. `rounding` is the rule, one of `ROUNDINGS`, by which the destination
    stores values.

    Raises:
        RelayoutError: an unknown type or rule, two types of which none is fp8, a rule other than the nearest number for
            a type that is not fp8, or a scale that is not above 0.
    """

    def __init__(
        self,
        src_element: str,
        dst_element: str,
        scales: npt.NDArray[np.float32],
        device: str,
        *,
        rounding: str = "nearest",
    ) -> None:
        self.src_item_bytes = element_bytes(src_element)
        self.dst_item_bytes = element_bytes(dst_element)
        if not (is_scaled(src_element) or is_scaled(dst_element)):
            raise RelayoutError(f"{src_element} is not converted to {dst_element}: neither is fp8")
        if rounding not in ROUNDINGS:
            raise RelayoutError(f"no rule {rounding!r} is known, only {', '.join(ROUNDINGS)}")
        if rounding != "nearest" and not is_scaled(dst_element):
            raise RelayoutError(f"numbers of {dst_element} are rounded to nearest, not {rounding}")
        check_device(device)
        if scales.dtype != np.float32 or scales.ndim != 3 or scales.shape[2] != 2:
            raise RelayoutError(
                f"scales are float32 [num_parts, num_heads, 2], not {scales.dtype} of shape {scales.shape}"
            )
        if not (np.isfinite(scales) & (scales > 0)).all():
            raise RelayoutError("scales are finite numbers above 0")
        self.src_element, self.dst_element = src_element, dst_element
        self.rounding = rounding
        types = ELEMENT_TYPES[src_element] << 8 | ELEMENT_TYPES[dst_element]
        self.number = ROUNDINGS[rounding] << 16 | types
        self.scales = np.array(scales, dtype=np.float32, order="C")
        self.device_scales: torch.Tensor | None = None
        if device != "cpu":
            import torch

            self.device_scales = torch.tensor(self.scales).to(device)
        self.row_bytes = self.scales.strides[0]
        """Bytes of the scales of one row."""

    @property
    def scales_address(self) -> int:
        """The address of the scales on the device."""
        if self.device_scales is not None:
            return self.device_scales.data_ptr()
        address: int = self.scales.__array_interface__["data"][0]
        return address

    def kernel_scales(self) -> Any:
        """Return the scales as Triton takes them."""
        if self.device_scales is not None:
            return self.device_scales
        import torch

        return torch.tensor(self.scales)
