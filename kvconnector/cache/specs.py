"""What each layer caches, how large it is, and which layers share block ids and memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from math import prod
from types import MappingProxyType

from kvconnector.errors import CacheSpecError, require_at_least

ITEM_SIZES_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element of every known type, by torch's name without its prefix: no tensor library is needed."""


@dataclass(frozen=True, slots=True)
class DType:
    """An element type of a cache. Raises CacheSpecError: the name is none of `ITEM_SIZES_BYTES`."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in ITEM_SIZES_BYTES:
            raise CacheSpecError("unknown element type", name=self.name, known=[*ITEM_SIZES_BYTES])

    @property
    def item_size_bytes(self) -> int:
        return ITEM_SIZES_BYTES[self.name]

    def __str__(self) -> str:
        return self.name


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def _require_dtypes(*dtypes: DType) -> None:
    if not all(isinstance(dtype, DType) for dtype in dtypes):
        raise CacheSpecError("a dtype must be a DType", dtypes=dtypes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """What the worst case of a request's memory depends on, beside its cache specs; all positive, or CacheSpecError."""

    max_model_len: int
    """Tokens that one request may have, prompt and output together."""
    max_num_batched_tokens: int
    """Tokens that one step may compute, over all its requests."""
    decode_context_parallel_size: int = 1
    """Ranks over which the tokens of one request are spread."""

    def __post_init__(self) -> None:
        require_at_least(1, CacheSpecError, **asdict(self))


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(ABC):
    """The cache of one layer. A *page* is its memory for one block. Raises CacheSpecError: a field is out of range."""

    block_size: int

    def __post_init__(self) -> None:
        require_at_least(1, CacheSpecError, block_size=self.block_size)

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one page."""

    @abstractmethod
    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Most bytes of one request in this layer, on one rank. Raises CacheSpecError: the limits do not suit it."""

    @property
    def uniform_kind(self) -> Hashable:
        """Layers of equal kind and block size always need the same blocks, so one block table serves them."""
        return type(self).__name__


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """K and V of `block_size` tokens, `num_kv_heads` on this rank and `head_size`, or with `use_mla` one latent."""

    num_kv_heads: int
    head_size: int
    dtype: DType
    use_mla: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = {"num_kv_heads": self.num_kv_heads, "head_size": self.head_size}
        require_at_least(1, CacheSpecError, **sizes)
        _require_dtypes(self.dtype)

    @property
    def num_parts(self) -> int:
        """Arrays per page: K and V, or the latent."""
        return 1 if self.use_mla else 2

    @property
    def page_size_bytes(self) -> int:
        elements = self.block_size * self.num_kv_heads * self.head_size
        return self.num_parts * elements * self.dtype.item_size_bytes

    def _pages_bytes(self, num_tokens: int) -> int:
        return _ceil_div(num_tokens, self.block_size) * self.page_size_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token stays cached."""

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        tokens = _ceil_div(limits.max_model_len, limits.decode_context_parallel_size)
        return self._pages_bytes(tokens)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token attends to the last `sliding_window` tokens, itself included."""

    sliding_window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, CacheSpecError, sliding_window=self.sliding_window)
        if self.use_mla:
            raise CacheSpecError("a sliding window over MLA latents is not supported", spec=self)

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """Pages of the window before a step and of the step's tokens.

        One page more, because the window may start inside a block: six tokens fill `xxxx|xx..`, two blocks of four, but
        also `...x|xxxx|x...`, three. With context parallelism a window's tokens do not stay together: CacheSpecError.
        """
        if limits.decode_context_parallel_size != 1:
            raise CacheSpecError(
                "a sliding window cannot be spread by decode context parallelism", limits=limits
            )
        tokens = min(self.sliding_window - 1 + limits.max_num_batched_tokens, limits.max_model_len)
        return self._pages_bytes(tokens) + self.page_size_bytes

    @property
    def uniform_kind(self) -> Hashable:
        """Layers with different windows drop blocks at different times."""
        return (super().uniform_kind, self.sliding_window)


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """State tensors of a recurrent layer, such as a convolution's window and an SSM's state.

    A page holds one request's states one behind the other, in the order of `shapes`. `block_size` is the number of
    tokens after which a state may be kept for a prefix.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]

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

    @property
    def state_sizes_bytes(self) -> tuple[int, ...]:
        states = zip(self.shapes, self.dtypes, strict=True)
        return tuple(prod(shape) * dtype.item_size_bytes for shape, dtype in states)

    @property
    def page_size_bytes(self) -> int:
        return sum(self.state_sizes_bytes)

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """One page: the state does not grow with the request."""
        return self.page_size_bytes


def merge_specs(specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
    """The one spec that stands for all of `specs`. Raises CacheSpecError: there is none, or two differ."""
    if not specs:
        raise CacheSpecError("there is no spec to merge")
    for spec in specs:
        if spec != specs[0]:
            raise CacheSpecError("unequal specs cannot be merged", one=specs[0], other=spec)
    return specs[0]


@dataclass(frozen=True, slots=True)
class KVCacheTensor:
    """One allocation of `size` bytes, and the layers that live in it."""

    size: int
    shared_by: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers that may differ in heads or element type but share a block table: their specs, by layer name.

    Its page is a page of every layer. Raises CacheSpecError: there is no layer, or the layers are not of one kind and
    the group's block size.
    """

    kv_cache_specs: Mapping[str, KVCacheSpec]

    def __post_init__(self) -> None:
        super().__post_init__()
        # A private copy: a caller that goes on filling its dict must not change a frozen value.
        object.__setattr__(self, "kv_cache_specs", MappingProxyType(dict(self.kv_cache_specs)))
        specs = self.kv_cache_specs.values()
        block_sizes = {spec.block_size for spec in specs}
        if not self.is_uniform_type(self.kv_cache_specs) or block_sizes != {self.block_size}:
            raise CacheSpecError(
                "the layers of one group must be of one kind, and of its block size",
                kinds=sorted({str(spec.uniform_kind) for spec in specs}),
                block_sizes=sorted(block_sizes),
                block_size=self.block_size,
            )

    @staticmethod
    def is_uniform_type(kv_cache_specs: Mapping[str, KVCacheSpec]) -> bool:
        """Whether one block table can serve all these layers, of which there must be some."""
        specs = list(kv_cache_specs.values())
        if any(isinstance(spec, UniformTypeKVCacheSpecs) for spec in specs):
            return False
        return len({(spec.block_size, spec.uniform_kind) for spec in specs}) == 1

    @classmethod
    def from_specs(
        cls, kv_cache_specs: Mapping[str, KVCacheSpec]
    ) -> UniformTypeKVCacheSpecs | None:
        """One group for all these layers, or None when they are not uniform."""
        if not cls.is_uniform_type(kv_cache_specs):
            return None
        block_size = next(iter(kv_cache_specs.values())).block_size
        return cls(block_size=block_size, kv_cache_specs=kv_cache_specs)

    @property
    def page_size_bytes(self) -> int:
        return sum(spec.page_size_bytes for spec in self.kv_cache_specs.values())

    def max_memory_usage_bytes(self, limits: CacheLimits) -> int:
        """The layers share block ids, so all hold as many pages as the one that needs most."""
        num_pages = max(
            _ceil_div(spec.max_memory_usage_bytes(limits), spec.page_size_bytes)
            for spec in self.kv_cache_specs.values()
        )
        return num_pages * self.page_size_bytes

    def tensors(self, num_blocks: int, *, cross_layers: bool = False) -> tuple[KVCacheTensor, ...]:
        """The memory of `num_blocks` blocks: a tensor for each layer, or with `cross_layers` one for all. Raises
        CacheSpecError: the layers' pages differ, so that they cannot be an axis of one tensor.
        """
        sizes = {
            name: num_blocks * spec.page_size_bytes for name, spec in self.kv_cache_specs.items()
        }
        if not cross_layers:
            return tuple(KVCacheTensor(size, (name,)) for name, size in sizes.items())
        if len(set(self.kv_cache_specs.values())) > 1:
            raise CacheSpecError("layers of one tensor need equal specs", layer_names=list(sizes))
        return (KVCacheTensor(sum(sizes.values()), tuple(sizes)),)
