"""How attention backends of vLLM store a cache with one vector per token, by backend and by the bytes of a vector.

MLA latents, the keys of sparse attention's indexers and the states of compressors are registered as `[B, 1, N, C]`,
whatever they contain. Most are stored as this shape says: *rows*, one after the other. Some quantised ones are stored
in *planes*: a page has the values of all of its rows, then the scales of all of its rows, then maybe padding. Neither
the shape nor the element type shows which it is: a tensor of bytes may be either.

If planes were treated as rows, a page that is not full would arrive with its values and without their scales. So this
table says how each known backend stores rows of each known width. Anything else is refused: an engine that reads a page
in the wrong order computes with wrong numbers and reports no error.
"""

from __future__ import annotations

from collections.abc import Mapping

Planes = tuple[tuple[str, int], ...]
"""The planes of a page, in their order: the name of each, and the bytes of one of its rows."""

DENSE = frozenset(
    {
        "AITER_TRITON_MLA",
        "AMX_MLA",
        "CPU_MLA",
        "CUTLASS_MLA",
        "FLASHINFER_MLA",
        "FLASHMLA",
        "FLASH_ATTN_MLA",
        "ROCM_AITER_MLA",
        "TOKENSPEED_MLA",
        "TRITON_MLA",
    }
)
"""Backends that store latents of any width in rows: `concat_and_cache_mla`, or the like on a CPU."""
SPARSE = frozenset(
    {
        "FLASHINFER_MLA_SPARSE",
        "FLASHINFER_MLA_SPARSE_SM120",
        "FLASHINFER_MLA_SPARSE_SM90",
        "FLASHMLA_SPARSE",
        "FLASH_ATTN_MLA_SPARSE",
        "FLASH_ATTN_MLA_SPARSE_FA4",
        "ROCM_AITER_MLA_SPARSE",
        "XPU_MLA_SPARSE",
    }
)
"""Backends of DeepSeek-V3.2 and GLM-5.x, whose latents are rows, too. A row of `fp8_ds_mla` has 656 bytes: 512 values,
their scales, and 64 unquantised ones."""
INDEXERS_OF_KEYS = frozenset({"MINIMAX_M3_SPARSE_INDEXER"})
"""Indexers whose keys have no scales of their own. The kernel that stores a key computes its address from the slot
alone, as if there were no gaps between blocks."""
COMPRESSED = frozenset({"CompressorBackend", "FLASHINFER_MLA_SPARSE_DSV4", "DEEPSEEK_SPARSE_SWA"})
"""Backends of DeepSeek-V4: compressors, whose states are float32, one that stores its latents unpacked, and one for its
sliding window."""
PLAIN = DENSE | SPARSE | INDEXERS_OF_KEYS | COMPRESSED
"""Backends that store elements, as opposed to packed bytes, in rows."""

_ROWS: Planes = ()
_SCALED = ("DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER", "CPU_V4_INDEXER")
"""Indexers that quantise each key and keep a scale of four bytes for it. vLLM registers both as one vector of bytes."""
_PACKED: Mapping[tuple[str, int], Planes] = {
    ("FLASHMLA_SPARSE", 656): _ROWS,
    ("FLASHINFER_MLA_SPARSE_SM120", 656): _ROWS,
    # DeepSeek-V4's: 448 values in fp8 and 64 in bf16, then seven scales and a byte
    **{
        (backend, 584): (("latent", 576), ("latent-scales", 8))
        for backend in ("FLASHMLA_SPARSE_DSV4", "DEEPSEEK_SPARSE_SWA", "CPU_V4_MLA_SPARSE")
    },
    **{
        (backend, values + 4): (("index", values), ("index-scales", 4))
        for backend in _SCALED
        for values in (128, 64)  # in fp8, and in MXFP4
    },
}
"""How a backend stores rows of packed bytes."""
PAGE_TOKENS: Mapping[str, int] = {
    "FLASHMLA_SPARSE_DSV4": 256,
    "DEEPSEEK_V4_INDEXER": 256,
    "CPU_V4_MLA_SPARSE": 256,
    "CPU_V4_INDEXER": 256,
    "DEEPSEEK_SPARSE_SWA": 64,
}
"""Tokens in a page, for backends whose tensors do not show it. One block of vLLM's may hold several pages."""
MOST_PAGE_ROWS: Mapping[str, int] = {"DEEPSEEK_V32_INDEXER": 64}
"""The most rows in a page, for backends whose pages may have several lengths. If a row stands for several tokens, as in
GLM-5.3, a block with more rows holds several pages. The tensor does not show them; only the kernel sees them."""


def planes_of(backend: str, row_bytes: int, *, is_opaque: bool) -> Planes | None:
    """Return the planes of which a page consists.

    Args:
        backend: The name of the layer's attention backend.
        row_bytes: Bytes of one row, the cached vector.
        is_opaque: A row is packed bytes of several kinds, instead of elements of one type.

    Returns:
        The planes; empty if a page consists of rows, and None if it is not known how this backend stores them.
    """
    if is_opaque or backend in _SCALED:
        return _PACKED.get((backend, row_bytes))
    return _ROWS if backend in PLAIN else None
