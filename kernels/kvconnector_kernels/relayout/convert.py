"""Elements that change type while they are copied, see kernels/native/convert.c for the arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

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
BY_DIVISION, BY_RECIPROCAL, BY_PAIR, BY_FACTOR = range(4)
"""Ways in which a GPU divides by a scale, see `Conversion.division`."""
_PAIR_SCALES = (2.0**-30, 2.0**60)
"""Between these, no step of `BY_PAIR` overflows or loses bits to denormals where that could change an fp8 number."""
_HAVE_CASTS = (8, 9)
"""From this compute capability on, GPUs have instructions from and to fp8."""


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
        on_gpu = device != "cpu"
        self.signed_nan = rounding == "cast" and not on_gpu
        """True if NaN keeps its sign: a GPU's instructions know one NaN."""
        # a source's scale makes numbers larger or smaller before they are divided
        divided = self.scales if is_scaled(src_element) else self.scales[..., 1:]
        self._factors = single_factors(src_element, dst_element, self.scales, rounding)
        self.division = _division(divided, is_fused=on_gpu) if self._factors is None else BY_FACTOR
        """How a GPU divides by the destination's scales: `BY_DIVISION`; `BY_RECIPROCAL`, one multiplication, if all
        are powers of two; `BY_PAIR`, see `kernel_scales`; or `BY_FACTOR`, one multiplication by `single_factors`
        instead of that by the source's scale and the division."""
        self.has_casts = on_gpu and _has_casts(device)
        """True if the device's instructions convert from and to fp8."""
        self.device_scales: torch.Tensor | None = None
        if on_gpu:
            self.device_scales = self.kernel_scales().to(device)
        self.row_bytes = self.scales.strides[0]
        """Bytes of the scales of one row."""

    @property
    def scales_address(self) -> int:
        """The address of the scales on the device."""
        if self.device_scales is not None:
            return self.device_scales.data_ptr()
        address: int = self.scales.__array_interface__["data"][0]
        return address

    def kernel_scales(self) -> torch.Tensor:
        """Return the scales as the Triton kernel takes them, float32 `[num_parts, num_heads, 5]`: the source's, the
        destination's, the number nearest to the reciprocal of that, or the factor of `BY_FACTOR`, the largest number
        below the reciprocal, and what this lacks, rounded up. The last two are the reciprocal to within 2^-46 of it,
        and neither is 0.
        """
        import torch

        if self.device_scales is not None:
            return self.device_scales
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            exact = 1 / self.scales[..., 1].astype(np.float64)
            nearest = exact.astype(np.float32)
            below = np.where(nearest < exact, nearest, np.nextafter(nearest, np.float32(0)))
            lacking = exact - below
            rest = lacking.astype(np.float32)
            rest = np.where(rest < lacking, np.nextafter(rest, np.float32(np.inf)), rest)
        if self._factors is not None:
            nearest = self._factors
        columns = [self.scales[..., 0], self.scales[..., 1], nearest, below, rest]
        return torch.tensor(np.stack(columns, -1))


def single_factors(
    src_element: str, dst_element: str, scales: npt.NDArray[np.float32], rounding: str
) -> npt.NDArray[np.float32] | None:
    """Return a float for each of `scales`' rows and heads, by which every number of one kind of fp8 becomes the same
    number of the other as by multiplying with the first scale and dividing by the second. An fp8 type has so few
    numbers that all are tried. None: it is another conversion, or some head has no such factor, as where a quotient of
    two roundings is on the other side of a tie than that of one.
    """
    if not (is_scaled(src_element) and is_scaled(dst_element)) or rounding == "truncated":
        return None
    pairs, places = np.unique(scales.reshape(-1, 2), axis=0, return_inverse=True)
    ours, theirs = pairs[:, :1], pairs[:, 1:]
    numbers = _fp8_sizes(src_element)
    with np.errstate(over="ignore", under="ignore"):
        stored = _fp8_places(numbers * ours / theirs, dst_element, rounding)
        nearest = (ours.astype(np.float64) / theirs).astype(np.float32)
        found, missing = nearest.copy(), np.arange(len(pairs))
        beside = (np.nextafter(nearest, np.float32(to)) for to in (0, np.inf))
        for factors in (nearest, *beside):
            found[missing] = factors[missing]
            tried = _fp8_places(numbers * found[missing], dst_element, rounding)
            missing = missing[(tried != stored[missing]).any(axis=1)]
    # infinity times 0, and 0 times infinity, would be NaN
    if missing.size or found.min() == 0 or np.isinf(found).any():
        return None
    factor_of: npt.NDArray[np.float32] = found[places.reshape(scales.shape[:2]), 0]
    return factor_of


def _fp8_sizes(element: str) -> npt.NDArray[np.float32]:
    """Return the numbers of an fp8 type from 0 on, infinity included if there is one."""
    mantissa_bits, bias, count = (3, 7, 0x7F) if element == "float8_e4m3fn" else (2, 15, 0x7C)
    exponents, mantissas = np.divmod(np.arange(count), 1 << mantissa_bits)
    ones = np.where(exponents > 0, 1 << mantissa_bits, 0)
    sizes = (mantissas + ones) * 2.0 ** (np.maximum(exponents, 1) - bias - mantissa_bits)
    if element == "float8_e5m2":
        sizes = np.append(sizes, np.inf)
    return sizes.astype(np.float32)


def _fp8_places(
    sizes: npt.NDArray[np.float32], element: str, rounding: str
) -> npt.NDArray[np.intp]:
    """Return which number of `_fp8_sizes` stands for each size, by the rule `nearest` or `cast`."""
    numbers = _fp8_sizes(element).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if element == "float8_e5m2" and rounding == "cast":
        # infinity is rounded to as if it were the number after the largest one
        numbers = np.append(numbers, 65536.0)
    middles = ((numbers[1:] + numbers[:-1]) / 2).astype(np.float32)
    # what is exactly in the middle before an even number belongs to that one
    middles[1::2] = np.nextafter(middles[1::2], np.float32(0))
    return np.searchsorted(middles, sizes)


def _division(scales: npt.NDArray[np.float32], *, is_fused: bool) -> int:
    """Return how to divide by the last of each head's scales, which a first may have multiplied. `is_fused`: products
    are added without rounding them first.
    """
    theirs = scales[..., -1]
    smallest, largest = float(theirs.min()), float(theirs.max())
    if (np.frexp(theirs)[0] == 0.5).all() and smallest >= 2.0**-126 and largest <= 2.0**126:
        return BY_RECIPROCAL
    if is_fused and _PAIR_SCALES[0] <= float(scales.min()) and scales.max() <= _PAIR_SCALES[1]:
        return BY_PAIR
    return BY_DIVISION


def _has_casts(device: str) -> bool:
    import torch

    return (
        torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= _HAVE_CASTS
    )
