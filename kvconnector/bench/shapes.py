"""The cache shapes of public models, and the shapes of engines that hold them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta

from kvconnector.bench.sizes import parse_numbers
from kvconnector.cache.specs import DType
from kvconnector.errors import ConfigError
from kvconnector.ids import Rank
from kvconnector.layout.watermark import MAX_LAYERS
from kvconnector.topology import (
    EngineGeometry,
    GroupGeometry,
    ModelDescription,
    PartGeometry,
    RankGeometry,
    TpKVTopology,
)
from kvconnector.wire.packed_geometry import MAX_RANKS

if TYPE_CHECKING:
    from kvconnector.planning import Retention

Layout = Literal["HND", "NHD"]
Keeps = Literal["all", "window", "chunk", "encoder", "state"]
"""`kvconnector.planning.Keeps`, which the releases that a soak runs do not all have."""
MAX_COUNT = (1 << 31) - 1
"""The largest number of heads, or of a head's elements, that a message carries."""
CONVERTIBLE = {"float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""`kvconnector.topology.geometry.ELEMENTS`, which the releases that a soak runs do not all have."""
PACKED = "fp8_ds_mla"
"""vLLM's name of latents in fp8 as FlashMLA's sparse attention stores them: 512 bytes, four scales in float32, and the
rotary key in bf16. They are not converted.
"""
PACKED_ROW_BYTES = 656
LATENT_SIZE = 576
"""Elements of DeepSeek's latents: 512, and a rotary key of 64."""
SHARED_INPUTS = ("conv-B", "conv-C")
"""Inputs of Mamba's convolution that a group of heads shares."""
NUMBERS = ("k", "v", "latent")
"""Names of parts whose elements are numbers of the cache's type."""
MISFIT = re.compile(r"Expected (.*) - at `\$\.(\w+)`")
"""What msgspec says of a value that does not fit."""
AtLeastOne = Annotated[int, Meta(ge=1)]
Scale = Annotated[float, Meta(gt=0, le=float(np.finfo(np.float32).max))]
"""The factor by which a stored number becomes its value."""


SHORT_TYPES = {
    **dict.fromkeys(("bf16", "torch.bfloat16", "auto"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "half", "torch.float16"), "float16"),
    **dict.fromkeys(("fp32", "f32", "float", "torch.float32"), "float32"),
    **dict.fromkeys(("fp8", "fp8_e4m3", "e4m3"), "float8_e4m3fn"),
    **dict.fromkeys(("fp8_e5m2", "e5m2"), "float8_e5m2"),
}
"""What engines call element types, and torch's names."""


def element_type(text: str) -> str:
    """Return an element type's name unchanged. Raises ConfigError: another one, with torch's name for a short one."""
    from kvconnector.cache.specs.spec import ITEM_SIZES_BYTES  # elsewhere in a soak's other release

    if text in ITEM_SIZES_BYTES:
        return text
    known = [*ITEM_SIZES_BYTES]
    raise ConfigError(f"no such element type{_meant(text, known)}", given=text, known=known)


def _meant(text: str, known: Sequence[str]) -> str:
    """Return a question for the element type that may be meant, empty if none is like it."""
    close = [SHORT_TYPES.get(text.lower(), ""), *difflib.get_close_matches(text, known, n=1)]
    meant = next((each for each in close if each in known), "")
    return f"; did you mean {meant!r}?" if meant else ""


class LayerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a model that cache alike: one layer's data per token, or its state, on all ranks together.

    Each of `parts` is a name, a number of heads (of a state, the units that tensor parallelism splits), the elements of
    a head, and the bytes of one. A block has `block_size` rows at least. `extent_tokens` are those of a window or a
    chunk. Cross-attention keeps `encoder_tokens`; 0: as many as the prompt has. Of layers that compress, `row_tokens`
    tokens share a row. vLLM's prefix cache has blocks of `cached_tokens` of these layers; 0: of the engine's tokens. A
    state that is not `is_cut` is one piece to an engine, which shares it with engines of equal tensor parallelism only.
    """

    kind: str
    layers: tuple[int, ...]
    parts: tuple[tuple[str, int, int, int], ...]
    keeps: Keeps = "all"
    extent_tokens: int = 0
    block_size: int = 1
    encoder_tokens: int = 0
    row_tokens: int = 1
    cached_tokens: int = 0
    is_cut: bool = True

    @property
    def retention(self) -> Retention:
        """The tokens of a sequence that these layers keep."""
        from kvconnector.planning import retention_named

        if self.row_tokens == 1:  # a soak's other release may not know more
            return retention_named(self.keeps, self.extent_tokens)
        return retention_named(self.keeps, self.extent_tokens, self.row_tokens)

    def missing(self, tokens: range) -> range:
        """Return the tokens, or rows, of a prompt that these layers lack before the next one can be computed."""
        if self.keeps == "all":  # a soak's other release may lack `retention_named`
            return range(tokens.start // self.row_tokens, tokens.stop // self.row_tokens)
        if self.keeps == "encoder":
            return range(self.encoder_tokens or tokens.stop)
        return self.retention.missing(tokens.start, tokens.stop)


def parts_of_token(
    num_kv_heads: int, head_dim: int, dtype: str, *, is_mla: bool
) -> tuple[tuple[str, int, int, int], ...]:
    """K and V of a token, or its latent. Raises CacheSpecError: no such element type."""
    sizes = (num_kv_heads, head_dim, DType(dtype).item_size_bytes)
    return tuple((name, *sizes) for name in (("latent",) if is_mla else ("k", "v")))


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model as its KV cache sees it. An MLA model has one part, the latent, with one head of `head_dim` elements.
    `num_draft_layers` (MTP) are not among its layers: engines cache them only where they draft with them.

    Layers that do not all keep every token are in `groups`; the heads are those of its attention then.
    """

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    is_mla: bool = False
    num_draft_layers: int = 0
    groups: tuple[LayerGroup, ...] = ()
    draft_groups: tuple[LayerGroup, ...] = ()
    """The draft layers, if it is known what they cache: numbered on from the model's, in its last pipeline stage."""
    assumptions: tuple[str, ...] = ()
    """What was not known of the model and was assumed, in words."""

    def __post_init__(self) -> None:
        most = {"num_layers": MAX_LAYERS, "num_kv_heads": MAX_COUNT, "head_dim": MAX_COUNT}
        for field, limit in most.items():
            if not 1 <= (value := getattr(self, field)) <= limit:
                raise ConfigError(f"{field} is 1 to {limit}", **{field: value})
        if self.is_mla and self.num_kv_heads != 1:
            raise ConfigError("an MLA cache has exactly one head", num_kv_heads=self.num_kv_heads)
        DType(self.dtype)

    @classmethod
    def parse(cls, text: str) -> ModelShape:
        """Parse a model such as "qwen3-8b" or "qwen3-8b,layers=2". Raises ConfigError: no such model or layers."""
        name, _, layers = text.partition(",layers=")
        if name not in MODELS:
            raise ConfigError("no such model", model=name, known=list(MODELS))
        (num_layers, *_) = parse_numbers(layers) or (MODELS[name].num_layers,)
        groups = [
            msgspec.structs.replace(group, layers=tuple(n for n in group.layers if n < num_layers))
            for group in MODELS[name].groups
        ]
        kept = tuple(group for group in groups if group.layers)
        if not layers:
            return MODELS[name]
        return msgspec.structs.replace(
            MODELS[name],
            num_layers=num_layers,
            groups=kept,
            num_draft_layers=0,
            draft_groups=(),
        )

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """`groups`, or one without a name that has all layers."""
        if self.groups:
            return self.groups
        sizes = self.num_kv_heads, self.head_dim, self.dtype
        parts = parts_of_token(*sizes, is_mla=self.is_mla)
        return (LayerGroup(kind="", layers=tuple(range(self.num_layers)), parts=parts),)

    def with_drafts(self) -> ModelShape:
        """Return the model with its draft layers, as engines exchange it that both draft.

        Raises:
            ConfigError: it has no draft layers, or it is not known what they cache.
        """
        if not self.num_draft_layers:
            raise ConfigError("the model has no MTP layers: leave --mtp out", model=self.name)
        if not self.draft_groups:
            raise ConfigError(
                "what this model's MTP layers cache is not known: leave --mtp out, and they are not counted",
                model=self.name,
                num_draft_layers=self.num_draft_layers,
            )
        kind = self.draft_groups[0].kind
        groups = [
            msgspec.structs.replace(group, kind=group.kind or kind) for group in self.layer_groups
        ]
        for draft in self.draft_groups:
            alike = msgspec.structs.replace(draft, kind="", layers=())
            for index, group in enumerate(groups):
                if msgspec.structs.replace(group, kind="", layers=()) == alike:
                    layers = (*group.layers, *draft.layers)
                    groups[index] = msgspec.structs.replace(group, layers=layers)
                    break
            else:
                groups.append(draft)
        return msgspec.structs.replace(self, groups=tuple(groups), draft_groups=())

    @property
    def counts_drafts(self) -> bool:
        """True if draft layers are among those that are cached."""
        return any(group.layers[-1] >= self.num_layers for group in self.groups)

    @property
    def is_sparse(self) -> bool:
        """True for latents with an indexer beside them, as DeepSeek-V3.2's and GLM-5's."""
        return self.is_mla and any(group.kind == "indexer" for group in self.groups)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, if each keeps all tokens."""
        return self.request_bytes(1)

    def ranges(self, tokens: range) -> list[range]:
        """Return the tokens of a prompt that each cache group lacks."""
        return [group.missing(tokens) for group in self.layer_groups]

    def request_bytes(self, num_tokens: int, dtype: str = "") -> int:
        """Return the bytes of `num_tokens` tokens that are loaded, on all ranks together. Engines load one token less
        than a prompt has if some layers do not keep all of them: the last one is computed where the next is sampled.
        `dtype` is the type of an engine's numbers, as in `EngineShape`; left out, the model's.
        """
        return sum(
            len(group.missing(range(num_tokens)))
            * len(group.layers)
            * _head_bytes(dtype, part)
            * part[1]
            for group in self.layer_groups
            for part in group.parts
        )

    def description(self) -> ModelDescription:
        """Return what two engines must agree on."""
        last = max(layer for group in self.layer_groups for layer in group.layers)
        num_layers = max(self.num_layers, last + 1)
        return ModelDescription(model=self.name, dtype=self.dtype, num_layers=num_layers)


def _head_bytes(dtype: str, part: tuple[str, int, int, int]) -> int:
    """Return the bytes of a head of a model's part, or of its unit, in an engine whose elements have this type."""
    name, _, size, item = part
    if name not in NUMBERS or not dtype:
        return size * item
    return PACKED_ROW_BYTES if dtype == PACKED else size * CONVERTIBLE[dtype]


def _latents(
    kind: str, layers: Iterable[int], planes: Sequence[tuple[str, int, int]], **more: Any
) -> LayerGroup:
    """Layers that keep one latent a row, replicated over tensor parallel ranks. A page has the rows' `planes` one after
    the other, each a name, the elements of a row and the bytes of one.
    """
    parts = tuple((name, 1, size, item) for name, size, item in planes)
    return LayerGroup(kind=kind, layers=tuple(layers), parts=parts, **more)


def windowed(
    name: str, num_layers: int, num_kv_heads: int, head_dim: int, *, window_tokens: int
) -> ModelShape:
    """Return a model whose layers, from the first on, have windows and every token in turn."""
    parts = parts_of_token(num_kv_heads, head_dim, "bfloat16", is_mla=False)
    every, kind = range(num_layers), f"window {window_tokens}"
    window: dict[str, Any] = {"keeps": "window", "extent_tokens": window_tokens}
    groups = (
        LayerGroup(kind="full", layers=tuple(every[1::2]), parts=parts),
        LayerGroup(kind=kind, layers=tuple(every[::2]), parts=parts, **window),
    )
    return ModelShape(
        name=name,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        groups=groups,
    )


LATENT_PLANES = (("latent", 576, 1), ("latent-scales", 8, 1))
"""A row of DeepSeek-V4's latents in fp8: 448 bytes and 64 rotary elements of two; 7 scales and a byte of padding."""
INDEX_PLANES = (("index", 128, 1), ("index-scales", 4, 1))
"""A row of an indexer's keys in fp8: 128 elements, then one float32 scale."""


def sparse_mla(
    name: str, num_layers: int, indexed: Iterable[int] | None = None, *, num_draft_layers: int = 1
) -> ModelShape:
    """Return a model with DeepSeek-V3.2's sparse attention (GLM-5 has it, too), as engines cache it in fp8: a latent of
    656 bytes a token in each layer, and an indexer's key in the layers `indexed`; None for all. Others share the choice
    of a layer before them. Draft layers have both.
    """

    def groups(every: Iterable[int], indexed: Iterable[int]) -> tuple[LayerGroup, ...]:
        return (
            _latents("sparse attention", every, (("latent", PACKED_ROW_BYTES, 1),)),
            _latents("indexer", indexed, INDEX_PLANES),
        )

    every = range(num_layers)
    drafts = range(num_layers, num_layers + num_draft_layers)
    return ModelShape(
        name=name,
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=PACKED_ROW_BYTES,
        dtype="uint8",
        is_mla=True,
        groups=groups(every, every if indexed is None else indexed),
        num_draft_layers=num_draft_layers,
        draft_groups=groups(drafts, drafts) if num_draft_layers else (),
    )


def compressed_mla(name: str, ratios: Sequence[int], *, num_draft_layers: int = 0) -> ModelShape:
    """Return a model with DeepSeek-V4's compressed attention, as vLLM caches it in fp8.

    Every layer keeps a window of 128 latents. One with a ratio of 4 or 128 (else 0) also keeps a latent for each 4 or
    128 tokens, with 4 an indexer's key beside it, and in float32 what the next row needs of the latest tokens: with 4
    rows overlap, so these are a window of 8, with 128 one of 128.

    Args:
        name: The model's name.
        ratios: The compression of each layer.
        num_draft_layers: Layers after these that draft, which keep a window only.

    Raises:
        ConfigError: a ratio is none of these.
    """
    if unknown := sorted({*ratios} - {0, 1, 4, 128}):
        raise ConfigError(
            "a layer's compression ratio must be 4 or 128", model=name, unknown=unknown
        )
    fine = [layer for layer, ratio in enumerate(ratios) if ratio == 4]
    coarse = [layer for layer, ratio in enumerate(ratios) if ratio == 128]
    drafts = range(len(ratios), len(ratios) + num_draft_layers)

    windows: dict[str, Any] = {"keeps": "window", "extent_tokens": 128, "cached_tokens": 64}
    coarse_states = {"keeps": "chunk", "extent_tokens": 128, "cached_tokens": 8}
    fine_states = {"keeps": "window", "extent_tokens": 8, "cached_tokens": 4}
    groups = (
        _latents("window", range(len(ratios)), LATENT_PLANES, **windows),
        _latents("indexer", fine, INDEX_PLANES, row_tokens=4),
        _latents("rows of 128", coarse, LATENT_PLANES, row_tokens=128),
        _latents("rows of 4", fine, LATENT_PLANES, row_tokens=4),
        _latents("state of 128", coarse, (("state", 1024, 4),), **coarse_states),
        _latents("state of 4", fine, (("state", 2048, 4),), **fine_states),
        _latents("indexer's state", fine, (("state", 512, 4),), **fine_states),
    )
    return ModelShape(
        name=name,
        num_layers=len(ratios),
        num_kv_heads=1,
        head_dim=584,
        dtype="uint8",
        is_mla=True,
        groups=tuple(group for group in groups if group.layers),
        num_draft_layers=num_draft_layers,
        draft_groups=(_latents("window", drafts, LATENT_PLANES, **windows),) if drafts else (),
    )


DEEPSEEK_V4_PRO = compressed_mla("deepseek-v4-pro", [128, *[128, 4] * 30], num_draft_layers=1)
DEEPSEEK_V4_FLASH = compressed_mla(
    "deepseek-v4-flash", [0, 0, *[4, 128] * 20, 4], num_draft_layers=1
)

# Layers, KV heads and head size from the models' public configurations. DeepSeek-R1 stores a latent of 512 and a
# rotary key of 64 elements.
MODELS = {
    model.name: model
    for model in (
        ModelShape(name="llama-3.1-8b", num_layers=32, num_kv_heads=8, head_dim=128),
        ModelShape(name="llama-3.1-70b", num_layers=80, num_kv_heads=8, head_dim=128),
        ModelShape(name="qwen3-8b", num_layers=36, num_kv_heads=8, head_dim=128),
        ModelShape(name="qwen3-235b", num_layers=94, num_kv_heads=4, head_dim=128),
        ModelShape(
            name="deepseek-r1",
            num_layers=61,
            num_kv_heads=1,
            head_dim=LATENT_SIZE,
            is_mla=True,
            num_draft_layers=1,
            draft_groups=(_latents("full attention", [61], (("latent", LATENT_SIZE, 2),)),),
        ),
        windowed("gpt-oss-120b", 36, 8, 64, window_tokens=128),
        sparse_mla("deepseek-v3.2", 61),
        sparse_mla("glm-5", 78),
        DEEPSEEK_V4_PRO,
        DEEPSEEK_V4_FLASH,
    )
}


class EngineShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One engine's parallelism, block size and layout.

    `dcp` neighbouring tensor ranks hold the same heads and share a request's tokens, `interleave` at a time. `dtype` is
    the type of K and V, or of a latent, if they are numbers that may be converted (docs/conversion.md); left out, it is
    the model's, and they are taken for bytes. In fp8 they have one `scale`, and are stored by the rule `rounding`.
    """

    tp: AtLeastOne = 1
    pp: AtLeastOne = 1
    block: AtLeastOne = 16
    layout: Layout = "NHD"
    dcp: AtLeastOne = 1
    interleave: AtLeastOne = 1
    dtype: str = ""
    scale: Scale = 1.0
    rounding: Literal["nearest", "cast"] = "nearest"

    def __post_init__(self) -> None:
        if self.tp * self.pp > MAX_RANKS:
            raise ConfigError(
                "an engine has too many ranks", tp=self.tp, pp=self.pp, max_ranks=MAX_RANKS
            )
        known = [*CONVERTIBLE, PACKED]
        if self.dtype and self.dtype not in known:
            raise ConfigError(
                f"elements of this type cannot be converted{_meant(self.dtype, known)}",
                dtype=self.dtype,
                known=known,
            )
        if not self.is_fp8 and (self.scale, self.rounding) != (1.0, "nearest"):
            raise ConfigError(
                "scale and rounding need dtype=float8_e4m3fn or float8_e5m2",
                dtype=self.dtype,
                scale=self.scale,
                rounding=self.rounding,
            )
        if self.tp % self.dcp or self.block % self.interleave:
            raise ConfigError(
                "dcp must divide tp, and interleave must divide block",
                tp=self.tp,
                dcp=self.dcp,
                block=self.block,
                interleave=self.interleave,
            )

    @classmethod
    def parse(cls, text: str) -> EngineShape:
        """Parse "tp=2,pp=1,block=16,layout=HND,dcp=2,interleave=8,dtype=float8_e4m3fn,scale=0.5,rounding=cast", any of
        it left out; tp is then dcp. Raises ConfigError: another name, a value below 1, a scale that is not above 0, an
        unknown layout, type or rule, or sizes that do not fit.
        """
        pieces = [piece.partition("=") for piece in text.replace(" ", "").split(",") if piece]
        try:
            fields = {
                name: value.upper() if name == "layout" else value for name, _, value in pieces
            }
            if len(fields) < len(pieces):
                raise ValueError("a name is given twice")
            if not all(fields.values()):
                raise ValueError("a name or a value is missing")
            return msgspec.convert({"tp": fields.get("dcp", 1), **fields}, cls, strict=False)
        except ValueError as error:
            raise ConfigError(
                "an engine's shape is written as"
                " tp=2,pp=1,block=16,layout=HND,dcp=2,interleave=8,dtype=float8_e4m3fn,"
                "scale=0.5,rounding=cast: " + MISFIT.sub(r"\2 must be \1", str(error)),
                given=text,
            ) from error

    def __str__(self) -> str:
        shared = f" dcp{self.dcp} interleave {self.interleave}" if self.dcp > 1 else ""
        return f"tp{self.tp} pp{self.pp} block {self.block} {self.layout}{self.elements}{shared}"

    @property
    def elements(self) -> str:
        """The type of the elements, and the scale and the rule if they are unusual, as words after a space."""
        scale = f" scale {self.scale:g}" if self.scale != 1 else ""
        rule = f" {self.rounding}" if self.rounding != "nearest" else ""
        return f" {self.dtype}{scale}{rule}" if self.dtype else ""

    @property
    def is_fp8(self) -> bool:
        """True if the elements are fp8."""
        return self.dtype.startswith("float8")

    def with_elements_of(self, other: EngineShape) -> EngineShape:
        """Return this shape with another one's type of elements, scale and rule."""
        return msgspec.structs.replace(
            self, dtype=other.dtype, scale=other.scale, rounding=other.rounding
        )

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks, in rank order."""
        return tuple(Rank(pp, tp) for pp in range(self.pp) for tp in range(self.tp))

    @property
    def virtual_block_tokens(self) -> int:
        """Tokens of a request that share one block id, on all ranks of a context parallel group."""
        return self.block * self.dcp

    def num_blocks(self, num_tokens: int) -> int:
        """Return the number of blocks on each rank that hold a request of `num_tokens`."""
        return -(-num_tokens // self.virtual_block_tokens)

    def first_blocks(self, model: ModelShape, num_tokens: int) -> list[tuple[int, int]]:
        """Return the first block that a request of `num_tokens` needs in each cache group, and their number."""
        groups = rank_geometry(model, self, self.ranks[0]).groups
        found = []
        for group, tokens in zip(groups, model.ranges(range(num_tokens)), strict=True):
            first = tokens.start // group.virtual_block_tokens
            found.append((first, -(-tokens.stop // group.virtual_block_tokens) - first))
        return found


def rank_geometry(model: ModelShape, shape: EngineShape, rank: Rank) -> RankGeometry:
    """Return the caches of one rank of such an engine. Raises ConfigError: fewer layers than pipeline stages, or heads
    or a type of elements that engines with such a model cannot have.
    """
    if shape.pp > model.num_layers:
        raise ConfigError(
            "an engine cannot have more pipeline stages than its model has layers",
            pp=shape.pp,
            num_layers=model.num_layers,
        )
    if shape.dtype == PACKED and not (model.is_sparse and model.head_dim == LATENT_SIZE):
        raise ConfigError(
            f"{PACKED} is a type of the latents of DeepSeek's sparse attention only",
            model=model.name,
            dtype=shape.dtype,
        )
    stage = TpKVTopology.layers_of(model.num_layers, pp_rank=rank.pp_rank, pp_size=shape.pp)
    if rank.pp_rank == shape.pp - 1:  # with the draft layers
        stage = range(stage.start, MAX_LAYERS)
    if shape.dtype and model.dtype not in CONVERTIBLE:
        raise ConfigError(
            "the caches of this model mix several kinds of bytes, which cannot be converted",
            model=model.name,
            dtype=shape.dtype,
        )
    groups = tuple(_group_geometry(shape, rank, stage, group) for group in model.layer_groups)
    return RankGeometry(pp_rank=rank.pp_rank, tp_rank=rank.tp_rank, groups=groups)


def _group_geometry(
    shape: EngineShape, rank: Rank, stage: range, group: LayerGroup
) -> GroupGeometry:
    # a block has the rows of its tokens, and one at least
    block_size = max(shape.block // group.row_tokens, group.block_size, 1)
    block_size = 1 if group.keeps == "state" else block_size
    # ranks share the tokens only of layers that keep all of them
    dcp_size = shape.dcp if group.keeps == "all" else 1
    if dcp_size > 1 and shape.interleave % group.row_tokens:
        raise ConfigError(
            "the interleave of context parallelism must be a multiple of a row's tokens",
            interleave=shape.interleave,
            row_tokens=group.row_tokens,
        )

    def part(name: str, total_heads: int, head_dim: int, item_size_bytes: int) -> PartGeometry:
        # a group of Mamba's heads that is the only one is on every rank
        is_shared = name in SHARED_INPUTS and total_heads == 1
        if group.keeps == "state" and total_heads % shape.tp and not is_shared:
            raise ConfigError(
                "an engine's ranks hold equal shares of a state: choose a tp that divides its heads",
                layers=group.kind,
                part=name,
                heads=total_heads,
                tp=shape.tp,
            )
        heads = TpKVTopology.heads_of(
            total_heads, tp_rank=rank.tp_rank, tp_size=shape.tp, dcp_size=dcp_size
        )
        counts = {"2": len(group.parts), "H": len(heads), "N": block_size, "D": head_dim}
        flat = {axis for axis, count in counts.items() if count == 1}
        typed = {}  # a soak's other release may not know more
        if shape.dtype == PACKED and name in NUMBERS:
            head_dim, item_size_bytes = PACKED_ROW_BYTES, 1
        elif shape.dtype and name in NUMBERS:
            item_size_bytes, typed = CONVERTIBLE[shape.dtype], {"element": shape.dtype}
            if shape.rounding != "nearest":
                typed["rounding"] = shape.rounding
        return PartGeometry(
            **typed,
            name=name if group.is_cut else f"{name}-tp{shape.tp}",
            total_heads=total_heads,
            head_start=heads.start,
            head_stop=heads.stop,
            head_dim=head_dim,
            item_size_bytes=item_size_bytes,
            memory_order="".join(axis for axis in f"2B{shape.layout}" if axis not in flat),
        )

    geometry = GroupGeometry(
        block_size=block_size,
        layers=tuple(layer for layer in group.layers if layer in stage),
        parts=tuple(part(*sizes) for sizes in group.parts),
        dcp_size=dcp_size,
        dcp_rank=rank.tp_rank % dcp_size,
        interleave_tokens=shape.interleave // group.row_tokens if dcp_size > 1 else 1,
    )
    if shape.is_fp8:
        scales = ((shape.scale,),) * len(group.parts)
        geometry = msgspec.structs.replace(geometry, scales=(scales,) * len(geometry.layers))
    # a soak's other release may not know more
    return (
        geometry
        if group.row_tokens == 1
        else msgspec.structs.replace(geometry, row_tokens=group.row_tokens)
    )


def with_types(model: ModelShape, *shapes: EngineShape) -> list[EngineShape]:
    """Return engines that all state the type of their elements if one of them does, the model's where they do not."""
    if model.dtype not in CONVERTIBLE or not any(shape.dtype for shape in shapes):
        return [*shapes]
    types = {shape.dtype for shape in shapes}
    if PACKED in types and len(types) > 1:
        raise ConfigError(
            f"{PACKED} is not converted: both engines have it, or neither", types=sorted(types)
        )
    return [msgspec.structs.replace(each, dtype=each.dtype or model.dtype) for each in shapes]


def check_exchange(model: ModelShape, prefill: EngineShape, decode: EngineShape) -> None:
    """Raise ConfigError or IncompatiblePeerError if engines of these shapes cannot exchange this model's caches."""
    whole = [group.kind for group in model.layer_groups if not group.is_cut]
    if whole and prefill.tp != decode.tp:
        raise ConfigError(
            "engines exchange these layers only with equal tensor parallelism: give both the same tp",
            layers=whole,
            prefill=prefill.tp,
            decode=decode.tp,
        )
    producer = engine_geometry(model, prefill, "prefill")
    consumer = engine_geometry(model, decode, "decode")
    TpKVTopology(consumer, decode.ranks[0]).check_compatible(producer)


def described(model: ModelShape, shape: EngineShape) -> ModelDescription:
    """Return what an engine of this shape must agree on with another one."""
    found = model.description()
    return msgspec.structs.replace(found, dtype=shape.dtype) if shape.dtype else found


def engine_geometry(model: ModelShape, shape: EngineShape, engine_id: str) -> EngineGeometry:
    """Return the caches of all ranks of such an engine. Raises as `rank_geometry`."""
    return EngineGeometry(
        engine_id=engine_id,
        tp_size=shape.tp,
        pp_size=shape.pp,
        model=described(model, shape),
        ranks=tuple(rank_geometry(model, shape, rank) for rank in shape.ranks),
    )
