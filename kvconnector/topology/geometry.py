"""The geometry of an engine: which layers, heads and tokens each rank holds. Two engines exchange it in a greeting.

Each rank states its layers and its range of heads, so uneven pipeline stages and any split of heads are plain data. For
a recurrent state a *head* is whatever the engine splits: channels, or state heads.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Annotated, NoReturn, TypeAlias

import msgspec
from msgspec import Meta

from kvconnector.errors import GeometryError, require_at_least
from kvconnector.ids import PRINTED, Rank
from kvconnector.layout import ContextParallel
from kvconnector.layout.watermark import MAX_LAYERS

MAX_BLOCK_SIZE = 1 << 20
FP8_ELEMENTS = ("float8_e4m3fn", "float8_e5m2")
ELEMENTS = {"float16": 2, "bfloat16": 2, **dict.fromkeys(FP8_ELEMENTS, 1)}
"""Types of elements that can be converted, by torch's names, and their bytes."""
ROUNDINGS = ("nearest", "truncated", "cast")
"""Rules by which engines store fp8, see docs/conversion.md."""
UNKNOWN_ROUNDING = "unknown"
"""Stated by an engine whose kernel stores fp8 by none of `ROUNDINGS`: nothing is converted for it."""
REPLICAS_BY_INDEX = 1
"""The rule by which consumers of this release choose among replicas (`topology.sources`); 0 is that of earlier ones."""
MAX_ELEMENT_LENGTH = 32
"""The most characters that the name of an element type may have."""
MAX_PAIRS = 64
Stated: TypeAlias = Annotated[str, Meta(max_length=2048, pattern=PRINTED)]
"""Text about a model that an engine states, and a peer's error shows."""
Pairs: TypeAlias = Annotated[tuple[tuple[Stated, Stated], ...], Meta(max_length=MAX_PAIRS)]
_COMMIT = re.compile("[0-9a-f]{40}")
_DIGEST_BYTES = 8


class PartGeometry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One part of a layer's cache (K, V, latent, state) as one rank holds it.

    `total_heads`, `head_dim` (elements) and `item_size_bytes` are the model's; `[head_start, head_stop)` is this rank's
    share in global head numbering. `memory_order` is as `layout.memory_orders` returns it, or empty if it is not known.
    `element` is the type of the elements: one of `ELEMENTS` if another engine may have them in another of these, or any
    name, on which both must agree. If it is empty, bytes are moved, whatever the other engine states. An fp8 number
    times its scale in `GroupGeometry.scales` is a value. `rounding` is the rule by which the engine stores values in
    fp8, one of `ROUNDINGS`.

    Raises GeometryError: the head range is empty or beyond the model's heads, a size is below one, or the
    element's type has another size.
    """

    name: str
    total_heads: int
    head_start: int
    head_stop: int
    head_dim: int
    item_size_bytes: int
    memory_order: Annotated[str, Meta(max_length=6, pattern="^[LB2HND]*$")] = ""
    element: Annotated[str, Meta(max_length=MAX_ELEMENT_LENGTH, pattern="^[a-z0-9_]*$")] = ""
    rounding: Annotated[str, Meta(max_length=32, pattern="^[a-z0-9_]+$")] = "nearest"

    def __post_init__(self) -> None:
        if not 0 <= self.head_start < self.head_stop <= self.total_heads:
            raise GeometryError(
                "a part needs 0 <= head_start < head_stop <= total_heads", part=self
            )
        sizes = {"head_dim": self.head_dim, "item_size_bytes": self.item_size_bytes}
        require_at_least(1, GeometryError, **sizes)
        if ELEMENTS.get(self.element, self.item_size_bytes) != self.item_size_bytes:
            raise GeometryError("elements of this type have a different size", part=self)

    @property
    def num_heads(self) -> int:
        """Number of heads that this rank holds."""
        return self.head_stop - self.head_start

    @property
    def model_key(self) -> tuple[int, int, int]:
        """The values on which both engines must agree. Parts with equal keys are transferred together."""
        return (self.total_heads, self.head_dim, self.item_size_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one layer on this rank."""
        return self.num_heads * self.head_dim * self.item_size_bytes

    @property
    def block_order(self) -> str:
        """The axes within a block, slowest first: "HND", "NHD", or fewer letters if an axis has a single element."""
        return "".join(axis for axis in self.memory_order if axis in "HND")


class PartFamily(PartGeometry, frozen=True, kw_only=True):
    """Parts with one shape (usually K and V), which share a table of addresses, a launch and a message. `part_indices`
    are their positions in `GroupGeometry.parts`; the other fields are those of the first of them.
    """

    part_indices: tuple[int, ...]

    @property
    def head_range(self) -> range:
        return range(self.head_start, self.head_stop)

    @property
    def num_parts(self) -> int:
        return len(self.part_indices)

    @property
    def head_token_bytes(self) -> int:
        """Bytes of one head of one token of one part."""
        return self.head_dim * self.item_size_bytes


class GroupGeometry(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, cache_hash=True, dict=True
):
    """A cache group on one rank: layers (global indices) with a common block table. `block_size` is in tokens.

    In a compressed group a row stands for `row_tokens` tokens: row `i` for the tokens from `i * row_tokens` on, and it
    exists once the last of them is computed. Everything that counts tokens in other groups counts rows in such a group:
    `block_size`, `interleave_tokens`, stripes, ranges of tokens, blocks. Watermarks and offers count tokens.

    With decode context parallelism, `dcp_size` ranks take the tokens in turns of `interleave_tokens`, and one block id
    stands for a block on each of them. `scales[layer][part]`, if stated, are the factors by which a quantised cache's
    numbers are multiplied: one, or one for each head that this rank holds.

    Another engine may lack `optional_layers`, such as those of a draft model, and then nothing of them is loaded.

    Raises GeometryError: layers do not ascend, there is no part, two parts have one name, a size or the rank is out of
    range, `interleave_tokens` does not divide the block size, a layer, a part or a head has no scale, or an optional
    layer is not among the layers.
    """

    block_size: int
    layers: tuple[int, ...]
    parts: tuple[PartGeometry, ...]
    dcp_size: int = 1
    dcp_rank: int = 0
    interleave_tokens: int = 1
    scales: tuple[tuple[tuple[float, ...], ...], ...] = ()
    row_tokens: int = 1
    optional_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_BLOCK_SIZE:
            raise GeometryError("block_size is out of range", block_size=self.block_size)
        if not 1 <= self.row_tokens <= MAX_BLOCK_SIZE:
            raise GeometryError("row_tokens is out of range", row_tokens=self.row_tokens)
        if self.context_parallel.world_size > 1 and self.block_size % self.interleave_tokens:
            raise GeometryError("the interleave does not divide the block", group=self)
        self._check_layers()
        names = [part.name for part in self.parts]
        if not names or len(set(names)) != len(names):
            raise GeometryError("a group needs parts with distinct names", parts=names)
        for family in self._parts_by_key().values():
            shares = {(self.parts[i].head_start, self.parts[i].head_stop) for i in family}
            if len(shares) > 1:
                raise GeometryError("parts of one shape must hold the same heads", parts=self.parts)
        counts = [(1, part.num_heads) for part in self.parts]
        if self.scales and (
            len(self.scales) != len(self.layers)
            or any(len(layer) != len(counts) for layer in self.scales)
            or any(
                len(s) not in c for layer in self.scales for s, c in zip(layer, counts, strict=True)
            )
        ):
            text = "scales are stated for each layer and part, one or one for each head"
            raise GeometryError(text, layers=self.layers, parts=names)

    def _check_layers(self) -> None:
        if any(b <= a for a, b in zip(self.layers, self.layers[1:], strict=False)):
            raise GeometryError("layers must ascend strictly", layers=self.layers)
        if self.layers and not 0 <= self.layers[0] <= self.layers[-1] < MAX_LAYERS:
            raise GeometryError("layer indices are out of range", layers=self.layers)
        if not {*self.layers}.issuperset(self.optional_layers):
            text = "a group's optional layers are some of its layers"
            raise GeometryError(text, layers=self.layers, optional_layers=self.optional_layers)

    def _parts_by_key(self) -> dict[tuple[int, int, int], list[int]]:
        by_key: dict[tuple[int, int, int], list[int]] = {}
        for index, part in enumerate(self.parts):
            by_key.setdefault(part.model_key, []).append(index)
        return by_key

    @cached_property
    def families(self) -> tuple[PartFamily, ...]:
        """The parts grouped by shape, in the order of their first parts: the same on every engine of a model."""
        return tuple(
            PartFamily(
                **msgspec.structs.asdict(self.parts[indices[0]]), part_indices=tuple(indices)
            )
            for indices in self._parts_by_key().values()
        )

    @cached_property
    def context_parallel(self) -> ContextParallel:
        """This rank's place in its context parallel group, which determines the tokens that it holds."""
        return ContextParallel(
            world_size=self.dcp_size, rank=self.dcp_rank, interleave_tokens=self.interleave_tokens
        )

    @property
    def virtual_block_tokens(self) -> int:
        """Consecutive tokens of a request that one block id stands for, on all ranks of its group together."""
        return self.block_size * self.dcp_size


def _common_values(group: GroupGeometry) -> tuple[object, ...]:
    """Return the values of a group that must be equal on all ranks of an engine."""
    parts = [(part.name, *part.model_key, part.element) for part in group.parts]
    return (group.block_size, group.dcp_size, group.interleave_tokens, group.row_tokens, parts)


class RankGeometry(msgspec.Struct, frozen=True, kw_only=True):
    """One worker's holding. Every rank of an engine lists the same groups in the same order."""

    pp_rank: int
    tp_rank: int
    groups: tuple[GroupGeometry, ...]

    @property
    def rank(self) -> Rank:
        return Rank(self.pp_rank, self.tp_rank)


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Values, not shapes, on which two engines must agree: the weights that wrote the cache, and its number format.

    What is left empty is not stated, as by engines of earlier releases, and agrees with everything.

    Args:
        model: The model's name.
        dtype: The name of the type of the elements.
        num_layers: Layers of the whole model.
        quantization: Of the weights.
        position_encodings: For each kind of layers its name, and the encoding and its parameters in a form that is the
            same for all engines. A single one, without a name, is that of all layers, or of those of a kind that the
            engine does not tell apart: it is compared with a single one alone.
        revision: `REPOSITORY@COMMIT`, or `REPOSITORY@REVISION` if the commit is not known. Two engines are compared
            only if both name one repository, and both a commit or neither one.
        config: Names and values of other fields of the model's configuration that change numbers but no shape. One that
            a single engine states is not compared.
    """

    model: str
    dtype: str
    num_layers: int
    quantization: str = ""
    position_encodings: Pairs = ()
    revision: Stated = ""
    config: Pairs = ()

    def stated(self) -> dict[str, object]:
        """Return the values that are stated, by the names that errors call them. Equal names are compared."""
        values: dict[str, object] = {
            "model": self.model,
            "dtype": self.dtype,
            "num_layers": self.num_layers,
            "quantization": self.quantization,
        }
        for kind, text in self.position_encodings:
            values[f"position_encoding of {kind}" if kind else "position_encoding"] = text
        repository, _, revision = self.revision.rpartition("@")
        if repository:
            is_commit = _COMMIT.fullmatch(revision)
            values[f"{'' if is_commit else 'requested '}revision of {repository}"] = revision
        return values | {f"config.{name}": value for name, value in self.config}


_Share: TypeAlias = dict[int, tuple[tuple[GroupGeometry, tuple[Rank, ...]], ...]]


class EngineGeometry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """All workers of one engine, ordered by (pp_rank, tp_rank). `verify` is the setting of that name; `replica_rule` is
    the newest rule that it knows of those by which consumers choose among replicas. `converts` is False if its setting
    `convert` forbids that elements change type on the way.

    The last `num_optional` cache groups are optional: another engine may lack them, and then they are not transferred,
    in either direction. Two engines must agree on all groups up to the end of the shorter list. So an engine registers
    first what every engine of the model has, then what some have, such as a draft model's cache.

    Raises GeometryError: a rank is missing or out of order; ranks differ in their groups' number, block size, parts or
    context parallelism; ranks of a stage hold different layers; no rank of a stage holds some of the tokens; a layer
    of a group belongs to several stages; or there are fewer groups than optional ones.
    """

    engine_id: str
    tp_size: int
    pp_size: int
    model: ModelDescription
    ranks: tuple[RankGeometry, ...]
    verify: str = "none"
    replica_rule: int = REPLICAS_BY_INDEX
    num_optional: int = 0
    converts: bool = True

    def __post_init__(self) -> None:
        require_at_least(1, GeometryError, tp_size=self.tp_size, pp_size=self.pp_size)
        self._check_ranks()
        if not 0 <= self.num_optional <= self.num_groups:
            text = "an engine has at least as many cache groups as optional ones"
            self._refuse(text, num_optional=self.num_optional, groups=self.num_groups)
        self._check_stages()

    def _check_ranks(self) -> None:
        # compare the counts before anything of that size is allocated, because a peer may claim any size
        if len(self.ranks) != self.world_size or any(
            rank.rank != divmod(index, self.tp_size) for index, rank in enumerate(self.ranks)
        ):
            self._refuse(
                "an engine lists every (pp_rank, tp_rank) once, in order",
                tp_size=self.tp_size,
                pp_size=self.pp_size,
                got=[str(rank.rank) for rank in self.ranks],
            )

    def _check_stages(self) -> None:
        owner: dict[tuple[int, int], int] = {}
        first = [_common_values(group) for group in self.ranks[0].groups]
        for stage, holdings in enumerate(self.holdings):
            for groups, ranks in holdings.items():
                if (other := [_common_values(group) for group in groups]) != first:
                    text, rank = "all ranks of an engine have the same groups", str(ranks[0])
                    self._refuse(text, first=first, rank=rank, other=other)
            held = {tuple(group.layers for group in groups) for groups in holdings}
            if len(held) > 1:
                text = "the ranks of a pipeline stage hold the same layers"
                self._refuse(text, pp_rank=stage, layers=sorted(held))
            for index, group in enumerate(self.stage(stage)[0].groups):
                present = sorted({groups[index].dcp_rank for groups in holdings})
                if len(present) != group.dcp_size:
                    text = "a pipeline stage has every rank of a context parallel group"
                    size = group.dcp_size
                    self._refuse(text, pp_rank=stage, group=index, dcp_size=size, dcp_ranks=present)
                for layer in group.layers:
                    if (other_stage := owner.setdefault((index, layer), stage)) != stage:
                        text = "a layer belongs to one pipeline stage"
                        self._refuse(text, layer=layer, stages=(other_stage, stage))

    def _refuse(self, text: str, **context: object) -> NoReturn:
        raise GeometryError(text, engine=self.engine_id, **context)

    @cached_property
    def holdings(self) -> tuple[dict[tuple[GroupGeometry, ...], tuple[Rank, ...]], ...]:
        """For each stage the distinct holdings of its ranks, each with the ranks that have it, in rank order."""
        stages: list[dict[tuple[GroupGeometry, ...], list[Rank]]] = []
        for pp_rank in range(self.pp_size):
            stages.append({})
            for rank in self.stage(pp_rank):
                stages[-1].setdefault(rank.groups, []).append(rank.rank)
        return tuple({groups: tuple(ranks) for groups, ranks in one.items()} for one in stages)

    @cached_property
    def shares(self) -> tuple[tuple[_Share, ...], ...]:
        """`shares[stage][group][dcp_rank]`: the distinct holdings, each with the ranks that have it."""
        stages = []
        for holdings in self.holdings:
            stage: tuple[_Share, ...] = tuple({} for _ in range(self.num_groups))
            for groups, ranks in holdings.items():
                for share, group in zip(stage, groups, strict=True):
                    share[group.dcp_rank] = (*share.get(group.dcp_rank, ()), (group, ranks))
            stages.append(stage)
        return tuple(stages)

    @property
    def num_groups(self) -> int:
        return len(self.ranks[0].groups)

    def num_common(self, other: EngineGeometry) -> int:
        """Return how many cache groups, from the first on, this engine and another one exchange."""
        return min(self.num_groups, other.num_groups)

    @property
    def num_required(self) -> int:
        """Number of cache groups, from the first on, that another engine must have."""
        return self.num_groups - self.num_optional

    @property
    def world_size(self) -> int:
        return self.tp_size * self.pp_size

    def rank_geometry(self, rank: Rank) -> RankGeometry:
        """Return one worker's holding. Raises GeometryError: the engine has no such rank."""
        if not (0 <= rank.pp_rank < self.pp_size and 0 <= rank.tp_rank < self.tp_size):
            size = str(Rank(self.pp_size, self.tp_size))
            self._refuse("the engine has no such rank", rank=str(rank), size=size)
        return self.ranks[rank.global_rank(self.tp_size)]

    def stage(self, pp_rank: int) -> tuple[RankGeometry, ...]:
        """Return the tensor-parallel ranks of one pipeline stage."""
        return self.ranks[pp_rank * self.tp_size : (pp_rank + 1) * self.tp_size]


def agreed_values(
    engine: EngineGeometry, num_groups: int, other: EngineGeometry | None = None
) -> dict[str, object]:
    """Return all values of an engine on which it must agree with one that has its first `num_groups` cache groups, by
    name. With several groups a name ends with the group's. Scales and other values that an engine does not state are
    left out: it may be of an earlier release. So are optional layers that only one of this engine and `other` has.
    """
    needed = max(num_groups, engine.num_required)
    values = {**engine.model.stated(), "verify": engine.verify, "cache_groups": needed}
    for index, parts in enumerate(parts_of(engine.ranks[0])[:num_groups]):
        names, heads, dims, sizes = zip(*parts, strict=True)
        lone = lone_layers(engine, other, index) if other is not None else frozenset()
        group = {
            "layers": _written(sorted(layers_of_group(engine, index) - lone)),
            "parts": names,
            "kv_heads": _joined(heads),
            "head_dim": _joined(dims),
            "item_size_bytes": _joined(sizes),
            "row_tokens": engine.ranks[0].groups[index].row_tokens,
        }
        if scales := scales_of(engine, index, lone):
            group["scales"] = scales
        end = f"_{index}" if num_groups > 1 else ""
        values |= {name + end: value for name, value in group.items()}
    return values


def layers_of_group(engine: EngineGeometry, index: int) -> frozenset[int]:
    """Return the layers of a cache group in all pipeline stages, whose ranks hold the same layers."""
    return frozenset(each for groups in _stages(engine) for each in groups[index].layers)


def lone_layers(engine: EngineGeometry, other: EngineGeometry, index: int) -> frozenset[int]:
    """Return the optional layers of a cache group that one of two engines has and the other lacks."""
    stated = frozenset(
        layer
        for each in (engine, other)
        for groups in _stages(each)
        for layer in groups[index].optional_layers
    )
    return stated and stated & (layers_of_group(engine, index) ^ layers_of_group(other, index))


def _stages(engine: EngineGeometry) -> list[tuple[GroupGeometry, ...]]:
    """Return the cache groups of the first rank of each pipeline stage."""
    return [engine.stage(pp_rank)[0].groups for pp_rank in range(engine.pp_size)]


def parts_of(rank: RankGeometry) -> list[list[tuple[str, int, int, int]]]:
    """Return the parts of every cache group, each as its name and the values of `PartGeometry.model_key`."""
    return [[(part.name, *part.model_key) for part in group.parts] for group in rank.groups]


def scales_of(engine: EngineGeometry, index: int, without: Collection[int] = frozenset()) -> str:
    """Return the scales of a group on all ranks as text, which is short and equal only if they are; "" if some rank
    with layers of the group does not state them. Those of the layers `without` are left out.
    """
    found: dict[tuple[int, str], dict[int, float]] = {}
    for holding in (groups[index] for stage in engine.holdings for groups in stage):
        if holding.layers and not holding.scales:
            return ""
        for layer, scales in zip(holding.layers, holding.scales, strict=True):
            if layer in without:
                continue
            for part, own in zip(holding.parts, scales, strict=True):
                heads = found.setdefault((layer, part.name), {})
                heads.update(enumerate(own, part.head_start))
    for place, heads in found.items():
        if len({*heads.values()}) == 1:
            found[place] = {0: heads.popitem()[1]}  # as if it were stated once for all heads
    numbers = [number for heads in found.values() for number in heads.values()]
    if not numbers:
        return ""
    stated = [(*place, sorted(heads.items())) for place, heads in sorted(found.items())]
    digest = hashlib.blake2b(msgspec.msgpack.encode(stated), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{min(numbers):.4g} to {max(numbers):.4g}, digest {digest}"


def _joined(values: tuple[int, ...]) -> int | tuple[int, ...]:
    """Return the parts' common value, or each part's value if they differ."""
    return values[0] if len(set(values)) == 1 else values


def _written(layers: Sequence[int]) -> str:
    """Return ascending layers as text: "0-31" if they are consecutive, otherwise a list of all."""
    if len(layers) > 1 and layers[-1] - layers[0] + 1 == len(layers):
        return f"{layers[0]}-{layers[-1]}"
    return ",".join(map(str, layers))
