"""Configuration of one engine: model, parallelism, cache, scheduling. All defaults are here. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec

from kvconnector.layout import required_cache_layout

Architecture = Literal[
    "llama", "mla", "hybrid", "chunked-local", "mamba", "encoder-decoder", "compressed"
]
LayerKind = Literal["full", "window", "chunk", "state", "encoder", "decoder", "fine", "coarse"]
CompressedKind = Literal[
    "fine_rows", "fine_index", "coarse_rows", "latents", "fine_compressor", "coarse_compressor"
]
CacheKind = Literal["full", "window", "chunk", "state", "cross"] | CompressedKind
Layout = Literal["HND", "NHD", "HDN", "CROSS"]
Role = Literal["prefill", "decode", "mono"]
BlockTables = Literal["host", "device"]
FailurePolicy = Literal["recompute", "fail"]
Count = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Span = Annotated[int, msgspec.Meta(ge=2)]
EvenSize = Annotated[int, msgspec.Meta(ge=2, multiple_of=2)]
"""Checked where options and files are read."""

ITEM_SIZE_BYTES = 4
"""The engine computes and caches in float32, so that two engines' greedy tokens can be compared exactly."""


class MixerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of layers that some architectures have in place of plain attention."""

    latent_rank: Size = 64
    """MLA: width of the compressed K and V that the cache holds per token."""
    rope_dim: EvenSize = 16
    """MLA: width of the decoupled rotary part, stored after the latent."""
    sliding_window: Span = 64
    """Hybrid and compressed: number of tokens that a query of a window layer sees, itself included."""
    attention_chunk: Size = 64
    """Chunked-local: tokens per chunk; a query sees only the tokens of its own chunk."""
    max_encoder_len: Size = 4096
    """Encoder-decoder: longest encoder input, in tokens."""
    state_dim: Size = 16
    """Mamba: rows of the state that each head keeps for each of its `head_dim` channels."""
    fine_tokens: Size = 4
    """Compressed: tokens of a row in layers with short rows, which overlap by a row and are chosen by an indexer."""
    coarse_tokens: Size = 16
    """Compressed: tokens of a row in layers with long rows, all of which are seen."""
    index_dim: Size = 16
    """Compressed: width of the indexer's queries and keys."""
    index_rows: Size = 8
    """Compressed: number of short rows that a query sees."""
    conv_width: Span = 4
    """Mamba: number of tokens that the causal convolution before the state sees."""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shape and seed of the model. `weights` names a safetensors file; empty: random from `seed`."""

    architecture: Architecture = "llama"
    vocab_size: Size = 1024
    hidden_size: Size = 256
    intermediate_size: Size = 512
    num_layers: Size = 8
    num_heads: Size = 8
    num_kv_heads: Size = 4
    head_dim: EvenSize = 32
    mixer: MixerConfig = MixerConfig()
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    max_model_len: int = 4096
    seed: int = 0
    weights: str = ""

    def __post_init__(self) -> None:
        if not self.has_latents and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def has_latents(self) -> bool:
        """True if a token's cache is one latent for all heads."""
        return self.architecture in ("mla", "compressed")

    @property
    def cache_heads(self) -> int:
        """KV heads of the whole model as the cache sees them: MLA has one latent for all heads."""
        return 1 if self.has_latents else self.num_kv_heads

    @property
    def cache_dim(self) -> int:
        """Elements that one cached head of one token holds, per part."""
        latent = self.mixer.latent_rank + self.mixer.rope_dim
        return latent if self.has_latents else self.head_dim

    def compressed_width(self, kind: CompressedKind) -> int:
        """Elements of a row, or of what a compressor keeps of a token: latent, an index key, and a weight."""
        latent, key = self.cache_dim, self.mixer.index_dim
        widths = {
            "fine_index": key,
            "fine_compressor": latent + key + 1,
            "coarse_compressor": latent + 1,
        }
        return widths.get(kind, latent)

    def row_tokens(self, kind: CacheKind) -> int:
        """Number of tokens that share a row of a cache."""
        fine, coarse = self.mixer.fine_tokens, self.mixer.coarse_tokens
        rows = {"fine_rows": fine, "fine_index": fine, "coarse_rows": coarse}
        return rows.get(kind, 1)

    @property
    def state_widths(self) -> dict[str, int]:
        """Elements of the parts of a state, per head: the convolution's last inputs and the recurrent state."""
        return {
            "conv": (self.mixer.conv_width - 1) * self.head_dim,
            "ssm": self.mixer.state_dim * self.head_dim,
        }

    @property
    def is_encoder_decoder(self) -> bool:
        """True if requests have an input for the encoder."""
        return self.architecture == "encoder-decoder"

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer: it keeps every token, a window, a chunk, one state, or short or long rows and a window.
        Mixtures alternate.

        The first quarter of an encoder-decoder model's layers is the encoder, which keeps nothing; each layer of the
        decoder keeps its own tokens and, for cross-attention, the encoder's output.
        """
        if self.is_encoder_decoder:
            num_encoders = max(1, self.num_layers // 4)
            return tuple(
                "encoder" if layer < num_encoders else "decoder" for layer in range(self.num_layers)
            )
        other: dict[Architecture, LayerKind] = {
            "hybrid": "window",
            "chunked-local": "chunk",
            "mamba": "state",
        }
        if self.architecture == "compressed":
            return tuple("coarse" if layer % 2 else "fine" for layer in range(self.num_layers))
        odd = other.get(self.architecture, "full")
        return tuple(odd if layer % 2 else "full" for layer in range(self.num_layers))


class ParallelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How ranks split the model. `pp_layers` has the layers per stage; empty: as even as possible.

    Runs of `dcp_size` tensor ranks cache the same heads and share a sequence's tokens, `interleave_tokens` at a time.
    """

    tp_size: Size = 1
    pp_size: Size = 1
    pp_layers: tuple[Size, ...] = ()
    dcp_size: Size = 1
    interleave_tokens: Size = 1

    def __post_init__(self) -> None:
        if self.tp_size % self.dcp_size:
            raise ValueError(f"dcp={self.dcp_size} must divide tp={self.tp_size}")
        if self.pp_layers and len(self.pp_layers) != self.pp_size:
            raise ValueError(f"layers={self.pp_layers} must be those of {self.pp_size} stages")

    @property
    def world_size(self) -> int:
        """Number of rank processes."""
        return self.tp_size * self.pp_size

    @property
    def num_head_shares(self) -> int:
        """Runs of tensor ranks that split the cached heads among each other."""
        return self.tp_size // self.dcp_size


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The paged cache of each rank. A `scatter_seed` shuffles the order of allocation, as in a busy cache."""

    block_size: Size = 16
    num_blocks: Count = 0
    """Blocks of every cache group; 0: as many as fit into the memory."""
    memory_mib: Count = 0
    """Memory of each rank's cache; 0: enough for four requests of the model's full length."""
    layout: Layout | None = None
    """None: the connector's preference, or attention's in an engine without a connector."""
    kernel_block_size: Count = 0
    """Tokens in a block as attention reads it, a divisor of `block_size`; 0: the same."""
    lookahead: Count = 0
    """Number of slots that a step allocates beyond its tokens, so that most steps change no block table."""
    scatter_seed: int | None = 0
    num_host_blocks: Count | None = None
    """Blocks in host memory that preempted requests are swapped out to. None: a quarter of the pool; 0: none, so that
    they are recomputed."""
    host_layout: Layout | None = None
    """Layout of blocks in host memory; None: as on the device."""
    host_block_size: Count = 0
    """Tokens in a block in host memory, a divisor of `block_size`; 0: the same."""
    prefix_caching: bool = True
    """Reuse the blocks of a prompt's beginning (prefix caching)."""
    state_interval: Size = 64
    """Recurrent states are kept for prefixes of each multiple of this many tokens, rounded up to whole blocks."""

    def __post_init__(self) -> None:
        if self.kernel_block_size and (
            self.layout != "NHD" or self.block_size % self.kernel_block_size
        ):
            raise ValueError(
                f"kernel={self.kernel_block_size} must divide block={self.block_size}, and needs layout=NHD, where "
                f"parts of blocks are blocks too: found layout={self.layout}"
            )
        size = self.resolved_host_block_size
        if self.block_size % size:
            raise ValueError(f"host_block={size} must divide block={self.block_size}")
        layouts = {self.layout, self.host_layout or self.layout}
        if "HDN" in layouts and (len(layouts) > 1 or size != self.block_size):
            raise ValueError(
                "blocks in host memory are as on the device where either has the layout HDN, whose K and V are stored "
                f"in different orders: layout={self.layout}, host_layout={self.host_layout}, host_block={size}"
            )

    @property
    def resolved_host_block_size(self) -> int:
        """Tokens of a block in host memory: as configured, else as on the device."""
        return self.host_block_size or self.block_size

    @property
    def state_block_size(self) -> int:
        """Tokens that share one block of recurrent states."""
        return -(-self.state_interval // self.block_size) * self.block_size

    def resolved_num_host_blocks(self, num_blocks: int) -> int:
        """Return the host pool's size in blocks, for a device pool of `num_blocks`."""
        return num_blocks // 4 if self.num_host_blocks is None else self.num_host_blocks


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: everything its server, its scheduler and its ranks need to know."""

    role: Role
    engine_id: str
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    device: Literal["cpu", "cuda"] = "cpu"
    device_offset: int = 0
    """Rank i runs on GPU (device_offset + i) % count."""
    block_tables: BlockTables | None = None
    """Where the ranks' block tables are; None: on the device if it is a GPU, else on the host."""
    max_batched_tokens: int = 2048
    max_running: int = 32
    failure_policy: FailurePolicy = "recompute"
    step_timeout_s: float = 120.0
    start_timeout_s: float = 90.0
    connector: dict[str, Any] = {}
    """Extra sections for `ConnectorConfig.from_mapping`, over the engine's own defaults."""

    def __post_init__(self) -> None:
        if self.parallel.dcp_size == 1:
            return
        # the host's block size divides the device's
        size = self.cache.resolved_host_block_size
        if size % self.parallel.interleave_tokens:
            raise ValueError(
                f"interleave={self.parallel.interleave_tokens} must divide block={size}"
            )
        if set(self.model.layer_kinds) != {"full"}:
            raise ValueError(
                f"dcp={self.parallel.dcp_size} needs layers that keep every token, and not all of "
                f"{self.model.architecture} do"
            )

    @property
    def resolved_layout(self) -> Layout:
        """Layout of the caches: as configured, else as the connector, or attention alone, prefers."""
        preferred = required_cache_layout(
            {} if self.role == "mono" else {"kv_connector": "kvconnector"}
        )
        return self.cache.layout or ("HND" if preferred == "HND" else "NHD")

    @property
    def caches_prefixes(self) -> bool:
        """True if prefixes are cached: as configured, but never if the cache also depends on an encoder's input."""
        return self.cache.prefix_caching and not self.model.is_encoder_decoder

    @property
    def resolved_block_tables(self) -> BlockTables:
        """Place of the block tables: as configured, else where they are fastest."""
        return self.block_tables or ("device" if self.device == "cuda" else "host")


def parse_engine_options(text: str) -> dict[str, str]:
    """Return `"tp=2,pp=1,block=16"` as a mapping. Repeated or malformed keys are refused."""
    options: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, separator, value = item.partition("=")
        if not separator or not value or key in options:
            raise ValueError(f"expected distinct key=value items separated by commas, got {text!r}")
        options[key] = value
    return options


PARALLEL_OPTIONS = {
    "tp": "tp_size",
    "pp": "pp_size",
    "dcp": "dcp_size",
    "interleave": "interleave_tokens",
    "layers": "pp_layers",
}
CACHE_OPTIONS = {
    "block": "block_size",
    "kernel": "kernel_block_size",
    "layout": "layout",
    "blocks": "num_blocks",
    "memory": "memory_mib",
    "host": "num_host_blocks",
    "host_layout": "host_layout",
    "host_block": "host_block_size",
    "prefix": "prefix_caching",
    "states": "state_interval",
    "lookahead": "lookahead",
}
"""Engine options, mapped to the fields that they set."""


def engine_shape(options: Mapping[str, str]) -> tuple[ParallelConfig, CacheConfig]:
    """Return parallelism and cache from `PARALLEL_OPTIONS` and `CACHE_OPTIONS`. Layers are given as 5+3, layouts in any
    case, prefix as on or off. `tp` defaults to `dcp`.

    Raises:
        ValueError: an unknown option, or a value that the field does not take.
    """
    known = {**PARALLEL_OPTIONS, **CACHE_OPTIONS}
    if unknown := set(options) - set(known):
        raise ValueError(f"unknown engine options {sorted(unknown)}; known are {sorted(known)}")
    values: dict[str, Any] = {"tp": options.get("dcp", 1), **options}
    for name in ("layout", "host_layout"):
        if name in options:
            values[name] = options[name].upper()
            if values[name] not in get_args(Layout):
                raise ValueError(f"{name} must be one of {get_args(Layout)}, not {values[name]!r}")
    if "layers" in options:
        values["layers"] = options["layers"].split("+")
    if "prefix" in options:
        if options["prefix"] not in {"on", "off"}:
            raise ValueError(f"prefix must be on or off, not {options['prefix']!r}")
        values["prefix"] = options["prefix"] == "on"

    def fields(table: Mapping[str, str]) -> dict[str, Any]:
        return {field: values[name] for name, field in table.items() if name in values}

    try:
        parallel = msgspec.convert(fields(PARALLEL_OPTIONS), ParallelConfig, strict=False)
        return parallel, msgspec.convert(fields(CACHE_OPTIONS), CacheConfig, strict=False)
    except msgspec.ValidationError as error:
        raise ValueError(f"engine options: {error}") from error


def load_engine_config(path: Path) -> EngineConfig:
    """Return the configuration that a parent process wrote with `save_engine_config`."""
    return msgspec.json.decode(path.read_bytes(), type=EngineConfig)


def save_engine_config(config: EngineConfig, path: Path) -> None:
    """Write `config` as JSON for a child process, readable by this user alone: it may name key files."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(config))
