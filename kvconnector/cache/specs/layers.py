"""Cache specs of single layers: all kinds of attention, rings of recent tokens, and recurrent states."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd, prod
from typing import ClassVar

from kvconnector.cache.specs.spec import CacheLimits, DType, KVCacheSpec, SpecT, ceil_div
from kvconnector.errors import CacheSpecError, require_at_least


def _require_dtypes(*dtypes: DType) -> None:
    if not all(isinstance(dtype, DType) for dtype in dtypes):
        raise CacheSpecError("a dtype must be a DType", dtypes=dtypes)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """K and V of `num_kv_heads` heads on this rank, `head_size` elements each; with `use_mla` one latent instead.

    A layer that compresses stores one row for `row_tokens` tokens, once it has the last of them. So a page has
    `block_size / row_tokens` rows, and tokens after the last whole row need no room here.
    """

    num_kv_heads: int
    head_size: int
    dtype: DType
    use_mla: bool = False
    row_tokens: int = 1
    can_compress: ClassVar[bool] = False
    """True if several tokens may share a row."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"num_kv_heads": self.num_kv_heads, "head_size": self.head_size}
        require_at_least(1, CacheSpecError, **sizes, row_tokens=self.row_tokens)
        _require_dtypes(self.dtype)
        if self.block_size % self.row_tokens:
            raise CacheSpecError("block_size must be a multiple of row_tokens", spec=self)
        if self.row_tokens > 1 and not self.can_compress:
            raise CacheSpecError(
                "a layer that keeps only some tokens must have row_tokens 1", spec=self
            )

    @property
    def rows_per_page(self) -> int:
        """Number of rows of a page."""
        return self.block_size // self.row_tokens

    @property
    def num_parts(self) -> int:
        """Number of arrays in a page: K and V, or the latent."""
        return 1 if self.use_mla else 2

    @property
    def page_size_bytes(self) -> int:
        elements = self.rows_per_page * self.num_kv_heads * self.head_size
        return self.num_parts * elements * self.dtype.item_size_bytes

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        return ceil_div(self._max_rows(limits), self.rows_per_page) * self.page_size_bytes

    @abstractmethod
    def _max_rows(self, limits: CacheLimits) -> int:
        """Return the most rows of one request on one rank, those of a page before them in it included."""


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token stays cached.

    A layer whose attention sees only a window or a chunk may still cache every token. Then `sliding_window` or
    `attention_chunk_size` (in tokens, at most one of the two) describes its mask, and saves no memory.
    """

    can_compress = True
    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        masks = {
            "sliding_window": self.sliding_window,
            "attention_chunk_size": self.attention_chunk_size,
        }
        require_at_least(1, CacheSpecError, **masks)
        if None not in masks.values():
            raise CacheSpecError(
                "a layer can have a sliding window or attention chunks, not both", **masks
            )

    def _max_rows(self, limits: CacheLimits) -> int:
        rows = limits.max_model_len // self.row_tokens
        return ceil_div(rows, limits.decode_context_parallel_size)

    @classmethod
    def merge(cls, specs: Sequence[SpecT]) -> SpecT:
        """Return one spec that stands for all of `specs`. If some have a window or a chunk size, so has the result.

        Raises:
            CacheSpecError: `specs` is empty, has both a window and a chunk size, or specs that differ otherwise.
        """
        if all(isinstance(spec, FullAttentionSpec) for spec in specs):
            for mask in ("sliding_window", "attention_chunk_size"):
                values = {getattr(spec, mask) for spec in specs} - {None}
                if len(values) == 1:
                    (value,) = values
                    specs = [replace(spec, **{mask: value}) for spec in specs]
        return super().merge(specs)


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A token attends to the tokens of its own chunk of `attention_chunk_size` tokens, up to itself."""

    attention_chunk_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, CacheSpecError, attention_chunk_size=self.attention_chunk_size)

    def _max_rows(self, limits: CacheLimits) -> int:
        """Return the rows of one chunk and of the tokens that one step adds.

        If the block size does not divide the chunk size, a chunk may start inside a block, at the latest at the last
        multiple of their greatest common divisor. The block's tokens before it count, too.
        """
        offset = self.block_size - gcd(self.block_size, self.attention_chunk_size)
        tokens = offset + self.attention_chunk_size + limits.max_num_batched_tokens
        return min(tokens, limits.max_model_len)

    @property
    def uniform_kind(self) -> Hashable:
        """Layers with different chunks drop blocks at different times."""
        return (super().uniform_kind, self.attention_chunk_size)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token attends to the last `sliding_window` tokens, itself included. A compressor's state of the tokens that its
    next row needs is such a window, too, and with `use_mla` so is a window of latents.
    """

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, CacheSpecError, sliding_window=self.sliding_window)

    def _max_rows(self, limits: CacheLimits) -> int:
        """Return the rows of the window before a step and of the step's tokens.

        There is one page more, because the window may start inside a block: six tokens fill two blocks of four, as in
        `xxxx|xx..`, or three, as in `...x|xxxx|x...`.

        Raises:
            CacheSpecError: context parallelism would spread the window's tokens over ranks.
        """
        if limits.decode_context_parallel_size != 1:
            raise CacheSpecError(
                "a sliding window cannot be spread by decode context parallelism", limits=limits
            )
        tokens = min(self.sliding_window - 1 + limits.max_num_batched_tokens, limits.max_model_len)
        return tokens + self.block_size

    @property
    def uniform_kind(self) -> Hashable:
        """Layers with different windows drop blocks at different times."""
        return (super().uniform_kind, self.sliding_window)


@dataclass(frozen=True, kw_only=True)
class RingSpec(AttentionSpec):
    """The last `block_size` tokens in one block, which is all that a request has here: the token at position `p` is in
    row `p % block_size`, and overwrites an older one. So a block serves one request, and no prefix of another.
    """

    def _max_rows(self, limits: CacheLimits) -> int:
        """Return the rows of the one block, which does not grow.

        Raises:
            CacheSpecError: context parallelism would spread the ring's tokens over ranks.
        """
        if limits.decode_context_parallel_size != 1:
            raise CacheSpecError(
                "a ring cannot be spread by decode context parallelism", limits=limits
            )
        return self.block_size


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """Attention among the tokens of a single step: nothing is kept between steps."""

    @property
    def is_cached(self) -> bool:
        return False

    def _max_rows(self, limits: CacheLimits) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """K and V of the encoder's output, written once per request."""

    def _max_rows(self, limits: CacheLimits) -> int:
        return limits.max_num_encoder_tokens


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """The states of a recurrent layer, such as a convolution's window and an SSM's state.

    A page holds the states of one request consecutively, in the order of `shapes`. `block_size` is the number of tokens
    after which a state may be kept for prefix caching. `page_size_padded` (bytes) makes a page as large as an attention
    layer's, so that both can share a tensor.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]
    page_size_padded: int | None = None
    mamba_type: str = "mamba2"
    num_speculative_blocks: int = 0
    """Number of further states of a request, one per speculative token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.shapes or len(self.shapes) != len(self.dtypes):
            raise CacheSpecError(
                "a recurrent layer needs one dtype per state shape, and at least one state",
                spec=self,
            )
        for size in chain(*self.shapes):
            require_at_least(1, CacheSpecError, state_size=size)
        _require_dtypes(*self.dtypes)
        require_at_least(0, CacheSpecError, num_speculative_blocks=self.num_speculative_blocks)
        require_at_least(
            sum(self.state_sizes_bytes), CacheSpecError, page_size_padded=self.page_size_padded
        )

    @property
    def state_sizes_bytes(self) -> tuple[int, ...]:
        states = zip(self.shapes, self.dtypes, strict=True)
        return tuple(prod(shape) * dtype.item_size_bytes for shape, dtype in states)

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or sum(self.state_sizes_bytes)

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Return the bytes of one page for the state, which does not grow, and of one per speculative token."""
        return (1 + self.num_speculative_blocks) * self.page_size_bytes

    @property
    def uniform_kind(self) -> Hashable:
        """Layers with different numbers of speculative states need different blocks."""
        return (super().uniform_kind, self.num_speculative_blocks)
