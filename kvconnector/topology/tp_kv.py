"""`TpKVTopology`: which rank holds what of a model's KV cache, and which rank reads what from which.

Pipeline stages split a model's layers, tensor-parallel ranks its heads, and ranks of a decode context parallel group
its tokens. In every cache group a rank holds a box of (layers x heads x tokens). What a consumer rank reads from a
producer rank is the intersection of two boxes, so no size has to divide another. If several producer ranks hold the
same (GQA with more ranks than heads, MLA), the consumer reads one of them.

An example: 6 layers and 2 KV heads, from a prefill engine with TP 4 to a decode engine with TP 3 and PP 2. The heads of
tensor rank `r` of `n` begin at `r * 2 // n`, and every rank has at least one, so both engines replicate heads:

    prefill pp0tp0   layers 0-5  head 0        decode pp0tp0   layers 0-2  head 0
            pp0tp1   layers 0-5  head 0              pp0tp1   layers 0-2  head 0
            pp0tp2   layers 0-5  head 1              pp0tp2   layers 0-2  head 1
            pp0tp3   layers 0-5  head 1              pp1tp0   layers 3-5  head 0
                                                     pp1tp1   layers 3-5  head 0
                                                     pp1tp2   layers 3-5  head 1

Decode rank pp1tp2 needs layers 3-5 of head 1, which prefill ranks tp2 and tp3 both hold: two replicas. The ranks that
need the same head read its replicas in turns (`topology.sources` has the rule), so the six ranks read

    pp0tp0 from tp0    pp0tp1 from tp1    pp0tp2 from tp2    pp1tp0 from tp0    pp1tp1 from tp1    pp1tp2 from tp3

Every (layer, head, token) of a decode rank arrives once, and one or two decode ranks read each prefill rank. On a
decode rank `tp_ratio` is 3/4 (ours over theirs), `pp_ratio` is 2, and `is_kv_replicated` is True for both engines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

from kvconnector.errors import GeometryError, IncompatiblePeerError, LocalError, require_counts
from kvconnector.ids import Rank
from kvconnector.layout import common_stripes
from kvconnector.topology.conversion import (
    elements_text,
    explains,
    is_converted,
    numbers_differ,
    obstacle,
)
from kvconnector.topology.geometry import (
    EngineGeometry,
    RankGeometry,
    agreed_values,
    parts_of,
)
from kvconnector.topology.segments import Segment, Target, differ
from kvconnector.topology.sources import Replicas, StageShare, rotation_of, sources_of, stage_shares

MAX_REMOTES = 1 << 10
"""The most engines that a topology remembers: enough for all engines of a large deployment, but not for every restart
of each.
"""


class TpKVTopology:
    """One rank of an engine: its holding, the ranks of another engine that it reads, and those that read it.

    Ratios are exact fractions *ours over theirs*: a `tp_ratio` of 2 means that we have twice as many ranks. The forms
    `..._from_engine_id` take the id of an engine that has passed `check_compatible`, instead of its geometry.

    Args:
        engine: All workers as they registered.
        rank: This rank.
        rotation: Where our engine begins among remote ranks with the same holding, if these are more than the ranks of
            ours that read them. By default a hash of the engine's id, so that engines spread over them.

    Raises:
        GeometryError: the engine has no such rank.
    """

    def __init__(self, engine: EngineGeometry, rank: Rank, *, rotation: int | None = None) -> None:
        self.engine = engine
        self.rank = rank
        self.geometry: RankGeometry = engine.rank_geometry(rank)
        self.rotation = rotation_of(engine) if rotation is None else rotation
        self._remotes: dict[str, EngineGeometry] = {}

    @staticmethod
    def heads_of(total_heads: int, *, tp_rank: int, tp_size: int, dcp_size: int = 1) -> range:
        """Return the heads that a rank holds of `total_heads`, in global numbering.

        Shares are runs of heads whose lengths differ by at most one. With more shares than heads, adjacent shares hold
        the same head. If one number divides the other, this is the split of Megatron-style tensor parallelism.

        Args:
            total_heads: KV heads of the model.
            tp_rank: The rank's place among the tensor-parallel ranks of its stage.
            tp_size: The engine's tensor-parallel size.
            dcp_size: How many adjacent ranks hold the same heads and share the tokens (decode context parallelism).

        Raises:
            GeometryError: there are no heads, the rank is outside the engine, or `dcp_size` does not divide `tp_size`.
        """
        sizes = {"tp_rank": tp_rank, "tp_size": tp_size, "dcp_size": dcp_size}
        require_counts(GeometryError, total_heads=total_heads, **sizes)
        if not (tp_rank < tp_size and total_heads > 0 and dcp_size > 0) or tp_size % dcp_size:
            raise GeometryError(
                "a rank needs 0 <= tp_rank < tp_size, a dcp_size that divides tp_size, and at least one head",
                total_heads=total_heads,
                tp_rank=tp_rank,
                tp_size=tp_size,
                dcp_size=dcp_size,
            )
        share, shares = tp_rank // dcp_size, tp_size // dcp_size
        start = share * total_heads // shares
        return range(start, max((share + 1) * total_heads // shares, start + 1))

    @staticmethod
    def layers_of(
        num_layers: int,
        *,
        pp_rank: int,
        pp_size: int,
        layers_per_stage: Sequence[int] | None = None,
    ) -> range:
        """Return the layers of a pipeline stage, in global numbering.

        Args:
            num_layers: Layers of the model.
            pp_rank: The stage.
            pp_size: The number of stages.
            layers_per_stage: The size of each stage. By default sizes differ by at most one, larger stages first.

        Raises:
            GeometryError: a stage has no layers, the sizes do not add up, or there is no such stage.
        """
        sizes = list(layers_per_stage or ())
        stages = {f"layers_per_stage[{stage}]": size for stage, size in enumerate(sizes)}
        require_counts(
            GeometryError, num_layers=num_layers, pp_rank=pp_rank, pp_size=pp_size, **stages
        )
        if pp_size > 0 and not sizes:
            short, longer = divmod(num_layers, pp_size)
            sizes = [short + (stage < longer) for stage in range(pp_size)]
        fits = len(sizes) == pp_size and sum(sizes) == num_layers and 0 <= pp_rank < pp_size
        if not fits or min(sizes) < 1:
            raise GeometryError(
                "every pipeline stage needs a layer, and layers_per_stage must add up to num_layers",
                num_layers=num_layers,
                pp_rank=pp_rank,
                pp_size=pp_size,
                layers_per_stage=tuple(sizes),
            )
        start = sum(sizes[:pp_rank])
        return range(start, start + sizes[pp_rank])

    @property
    def global_rank(self) -> int:
        """The index of this rank in its engine, stage by stage."""
        return self.rank.global_rank(self.engine.tp_size)

    def get_target_remote_ranks(self, remote: EngineGeometry) -> tuple[Target, ...]:
        """Return the remote ranks to read from. Together they deliver everything that we hold, each (layer, part, head,
        token) once, except optional cache groups and layers that the remote engine lacks.

        Args:
            remote: The engine to read from.

        Returns:
            Each rank with the segments to read from it, in rank order.

        Raises:
            IncompatiblePeerError: the remote engine has other cache groups or parts, or lacks a layer, a head or tokens
                that a rank of ours holds.
        """
        self._check_same_parts(remote)
        sources = sources_of(self.engine, remote, self.rotation)
        found: dict[Rank, list[Segment]] = {}
        for share in stage_shares(self.geometry.groups, remote):
            for source, heads in self._assigned(share, sources):
                found.setdefault(source, []).extend(self._segments(share, heads, remote))
        return tuple(Target(rank, tuple(found[rank])) for rank in sorted(found))

    def readers(self, remote: EngineGeometry) -> frozenset[Rank]:
        """Return the remote ranks that must confirm their reads to us before we free a request's blocks.

        These are the ranks that have us among their `get_target_remote_ranks`. If none has, our position selects one
        that confirms, so that some rank releases every one of ours.

        Args:
            remote: The engine that reads from us.

        Raises:
            IncompatiblePeerError: we lack a layer or a head that a remote rank holds.
        """
        found = sources_of(remote, self.engine, rotation_of(remote))
        reading = {
            remote.ranks[number].rank
            for sources in found.values()
            for number, source in sources.items()
            if source == self.rank
        }
        return frozenset(reading or {remote.ranks[self.global_rank % remote.world_size].rank})

    def holders(self, remote: EngineGeometry) -> tuple[Rank, ...]:
        """Return the remote ranks to greet: those that have us among their `readers`.

        Args:
            remote: The engine to read from.

        Raises:
            IncompatiblePeerError: as `get_target_remote_ranks`.
        """
        found = sources_of(self.engine, remote, self.rotation).values()
        read = {source for sources in found for source in sources.values()}
        ours = {sources[self.global_rank] for sources in found if self.global_rank in sources}
        at_our_position = remote.ranks[self.global_rank :: self.engine.world_size]
        unread = {rank.rank for rank in at_our_position} - read
        return tuple(sorted(ours | unread))

    def check_compatible(self, remote: EngineGeometry) -> None:
        """Refuse an engine whose cache differs from ours in meaning, and remember one that passes by its id.

        TP, PP and DCP sizes, block sizes, layouts and pool sizes may differ, and so may the types and scales of
        elements that are converted on the way. The newest `MAX_REMOTES` engines are remembered.

        Args:
            remote: The other engine, all ranks as they registered.

        Raises:
            IncompatiblePeerError: the engines disagree in the values that the error names, or the tokens of their
                context parallel ranks have too long a common period.
        """
        num_common = self.engine.num_common(remote)
        ours = agreed_values(self.engine, num_common, remote)
        theirs = agreed_values(remote, num_common, self.engine)
        our_name, peer_name = _names(self.engine, remote)
        differing = {
            name: {our_name: value, peer_name: theirs[name]}
            for name, value in ours.items()
            if name in theirs and value != theirs[name]
        }
        reasons = self._settle_elements(remote, differing)
        if differing:
            raise IncompatiblePeerError(
                "the engines cannot exchange blocks; configure both alike: they differ in "
                + ", ".join(differing)
                + _reason(differing)
                + reasons,
                **differing,
            )
        try:
            # one side may lack the other's optional groups
            for mine, other in zip(self.geometry.groups, remote.ranks[0].groups, strict=False):
                common_stripes(mine.context_parallel, other.context_parallel)
        except GeometryError as error:
            raise IncompatiblePeerError(
                error.message, engine=our_name, peer=peer_name, **error.context
            ) from error
        self._remotes.pop(remote.engine_id, None)
        self._remotes[remote.engine_id] = remote
        if len(self._remotes) > MAX_REMOTES:
            del self._remotes[next(iter(self._remotes))]

    def tp_ratio(self, remote: EngineGeometry) -> Fraction:
        """Return our tensor-parallel size over theirs.

        Args:
            remote: The other engine.
        """
        return Fraction(self.engine.tp_size, remote.tp_size)

    def pp_ratio(self, remote: EngineGeometry) -> Fraction:
        """Return our pipeline-parallel size over theirs.

        Args:
            remote: The other engine.
        """
        return Fraction(self.engine.pp_size, remote.pp_size)

    def block_size_ratio(self, remote: EngineGeometry, group: int = 0) -> Fraction:
        """Return our block size over theirs, in tokens of one rank.

        Args:
            remote: The other engine.
            group: The cache group.
        """
        ours, theirs = self.geometry.groups[group], remote.ranks[0].groups[group]
        return Fraction(ours.block_size, theirs.block_size)

    def tp_ratio_from_engine_id(self, engine_id: str) -> Fraction:
        """Return `tp_ratio` for a known engine.

        Args:
            engine_id: An engine that has passed `check_compatible`.

        Raises:
            LocalError: it has not.
        """
        return self.tp_ratio(self._remote(engine_id))

    def pp_ratio_from_engine_id(self, engine_id: str) -> Fraction:
        """Return `pp_ratio` for a known engine.

        Args:
            engine_id: An engine that has passed `check_compatible`.

        Raises:
            LocalError: it has not.
        """
        return self.pp_ratio(self._remote(engine_id))

    def block_size_ratio_from_engine_id(self, engine_id: str, group: int = 0) -> Fraction:
        """Return `block_size_ratio` for a known engine.

        Args:
            engine_id: An engine that has passed `check_compatible`.
            group: The cache group.

        Raises:
            LocalError: it has not.
        """
        return self.block_size_ratio(self._remote(engine_id), group)

    def get_target_remote_ranks_from_engine_id(self, engine_id: str) -> tuple[Target, ...]:
        """Return `get_target_remote_ranks` for a known engine.

        Args:
            engine_id: An engine that has passed `check_compatible`.

        Raises:
            LocalError: it has not.
            IncompatiblePeerError: as `get_target_remote_ranks`.
        """
        return self.get_target_remote_ranks(self._remote(engine_id))

    @staticmethod
    def is_kv_replicated(engine: EngineGeometry) -> bool:
        """Return True if tensor parallelism splits some part into more shares than it has heads, so that several ranks
        hold the same head: GQA with few KV heads, or MLA's one latent. Ranks that share tokens count as one share.

        Args:
            engine: The engine to examine.
        """
        return any(
            engine.tp_size // group.dcp_size > part.total_heads
            for group in engine.ranks[0].groups
            for part in group.parts
        )

    @staticmethod
    def replicates_kv_cache(engine: EngineGeometry) -> bool:
        """Return True if several ranks hold the same (layer, head, token), because of `is_kv_replicated` or because the
        ranks registered overlapping ranges of heads.

        Args:
            engine: The engine to examine.
        """
        held = Counter(
            (rank.pp_rank, index, number, group.dcp_rank, head)
            for rank in engine.ranks
            for index, group in enumerate(rank.groups)
            if group.layers
            for number, family in enumerate(group.families)
            for head in family.head_range
        )
        return max(held.values(), default=0) > 1

    def needs_relayout(self, remote: EngineGeometry) -> bool:
        """Return True if their blocks differ from ours in size, tokens, heads or the order of elements. A side that
        does not state its order is taken to have the other's.

        Args:
            remote: The other engine.

        Raises:
            IncompatiblePeerError: as `get_target_remote_ranks`.
        """
        return any(
            differ(self.geometry.groups[segment.group], theirs.groups[segment.group], segment)
            for target in self.get_target_remote_ranks(remote)
            for theirs in [remote.rank_geometry(target.rank)]
            for segment in target.segments
        )

    def describe(self, remote: EngineGeometry) -> str:
        """Return a line for people: ratios of ours to theirs, and whether blocks change their layout or are converted.

        Args:
            remote: The other engine.

        Raises:
            IncompatiblePeerError: as `get_target_remote_ranks`.
        """
        groups = range(self.engine.num_common(remote))
        sizes = dict.fromkeys(str(self.block_size_ratio(remote, group)) for group in groups)
        how = "change their layout" if self.needs_relayout(remote) else "are copied as they are"
        converted = self._converted(remote)
        if converted and not self.needs_relayout(remote):
            how = "keep their layout"
        ratios = f"tp {self.tp_ratio(remote)}, pp {self.pp_ratio(remote)}"
        types = "".join(
            f"; {elements_text(remote, index)} there, {elements_text(self.engine, index)} here: converted on the way"
            for index in converted
        )
        return f"{ratios}, block size {', '.join(sizes)}; blocks {how}{types}"

    def memory_order(self, group: int = 0) -> str:
        """Return the axes of a cache group's first part in memory, slowest first, as `layout.memory_orders` names them.

        Args:
            group: The cache group.

        Raises:
            GeometryError: the order is not known, as in a stage that has no layer of the group.
        """
        order = self.geometry.groups[group].parts[0].memory_order
        if not order:
            text = "the memory order of this cache group is not known"
            raise GeometryError(text, engine=self.engine.engine_id, group=group)
        return order

    def is_kv_layout_blocks_first(self, group: int = 0) -> bool:
        """Return True if a block has K and V together: `[B, 2, ...]`, packed in one axis, or one latent.

        Args:
            group: The cache group.

        Raises:
            GeometryError: as `memory_order`.
        """
        return not self.split_k_and_v(group)

    def split_k_and_v(self, group: int = 0) -> bool:
        """Return True if all blocks of K lie before or after all of V: `[2, B, ...]`.

        Args:
            group: The cache group.

        Raises:
            GeometryError: as `memory_order`.
        """
        return self.memory_order(group).startswith("2")

    def cross_layers_blocks(self, group: int = 0) -> bool:
        """Return True if a block has all layers of the group on this rank together.

        Args:
            group: The cache group.

        Raises:
            GeometryError: as `memory_order`.
        """
        return "L" in self.memory_order(group)

    def block_size_position(self, group: int = 0) -> int:
        """Return the position of the token axis among a block's axes in memory, counted back from the fastest (-1): -3
        in NHD, -2 in HND.

        Args:
            group: The cache group.

        Raises:
            GeometryError: as `memory_order`, or blocks have a single token.
        """
        order = self.memory_order(group)
        axes = self.geometry.groups[group].parts[0].block_order
        if "N" not in axes:
            raise GeometryError("blocks of one token have no token axis", group=group, order=order)
        return axes.index("N") - len(axes)

    def _remote(self, engine_id: str) -> EngineGeometry:
        if engine_id not in self._remotes:
            raise LocalError(
                "this engine has not been greeted", engine=engine_id, met=list(self._remotes)
            )
        return self._remotes[engine_id]

    def _converted(self, remote: EngineGeometry) -> list[int]:
        """Return the cache groups whose elements are converted."""
        groups = range(self.engine.num_common(remote))
        return [index for index in groups if is_converted(self.engine, remote, index)]

    def _settle_elements(
        self, remote: EngineGeometry, differing: dict[str, dict[str, object]]
    ) -> str:
        """Take out of the values in which the engines differ those of elements that are converted, and add types that
        are not. Returns why they are not, as the end of a sentence.
        """
        engines, num_common = (self.engine, remote), self.engine.num_common(remote)
        converted, reasons = self._converted(remote), ""
        for index in range(num_common):
            end = f"_{index}" if num_common > 1 else ""
            if index in converted:
                differing.pop("item_size_bytes" + end, None)
                differing.pop("scales" + end, None)
            elif numbers_differ(self.engine, remote, index):
                elements = [elements_text(engine, index) for engine in engines]
                if elements[0] != elements[1]:
                    names = _names(*engines)
                    differing["elements" + end] = dict(zip(names, elements, strict=True))
                reasons += f"; {obstacle(self.engine, remote, index)}"
        if converted and all(explains(one.model.dtype, one, range(num_common)) for one in engines):
            differing.pop("dtype", None)
        return reasons

    def _check_same_parts(self, remote: EngineGeometry) -> None:
        num_common = self.engine.num_common(remote)
        converted = self._converted(remote)
        ours, theirs = (
            [
                [part[:-1] if index in converted else part for part in parts]
                for index, parts in enumerate(parts_of(rank))
            ]
            for rank in (self.geometry, remote.ranks[0])
        )
        required = max(self.engine.num_required, remote.num_required)
        if required > num_common or ours[:num_common] != theirs[:num_common]:
            raise IncompatiblePeerError(
                "both engines need the same cache groups of the same parts",
                ours=ours,
                theirs=theirs,
                peer=remote.engine_id,
            )

    def _assigned(
        self, share: StageShare, sources: Mapping[Replicas, Mapping[int, Rank]]
    ) -> list[tuple[Rank, range]]:
        """Return the ranks that deliver a share, each with its heads, in ascending order."""
        assigned: list[tuple[Rank, range]] = []
        for heads, replicas in share.pieces:
            rank = sources[share.group, replicas][self.global_rank]
            continues = assigned and assigned[-1][0] == rank
            start = assigned.pop()[1].start if continues else heads.start
            assigned.append((rank, range(start, heads.stop)))
        return assigned

    def _segments(
        self, share: StageShare, heads: range, remote: EngineGeometry
    ) -> Iterator[Segment]:
        family = self.geometry.groups[share.group].families[share.family]
        theirs = remote.ranks[0].groups[share.group].families[share.family]
        for stripe in share.stripes:
            yield Segment(
                group=share.group,
                family=share.family,
                layers=share.layers,
                num_parts=family.num_parts,
                head_start=heads.start,
                head_stop=heads.stop,
                head_token_bytes=min(family.head_token_bytes, theirs.head_token_bytes),
                stripe=stripe,
            )


def _names(ours: EngineGeometry, theirs: EngineGeometry) -> tuple[str, str]:
    """Return what errors call two engines, also if an operator has given both the same id."""
    same = ours.engine_id == theirs.engine_id
    return ours.engine_id, f"{theirs.engine_id} (remote)" if same else theirs.engine_id


def _reason(differing: Mapping[str, Mapping[str, object]]) -> str:
    """Return what the names of values tell about the cause, as the end of a sentence; "" if they tell nothing."""
    for name, values in differing.items():
        one, other = values.values()
        if name.startswith(("position_encoding", "config.")):
            return (
                "; keys and values depend on this: both engines need the same config.json and the same --hf-overrides"
                " (vLLM) or --json-model-override-args (SGLang)"
            )
        if name.startswith("layers_"):
            return (
                "; layers that only one engine has, such as a draft model's, can change how it groups the others: start"
                " both with the same speculative configuration"
            )
        if "revision of " in name:
            return "; start both engines with the same --revision, or from the same files"
        for whole, planes in ((one, other), (other, one)):
            is_split = isinstance(planes, tuple) and any(
                f"{part}".endswith("-scales") for part in planes
            )
            if name.startswith("parts") and whole == ("latent",) and is_split:
                return (
                    "; the one with a single part takes pages whose values and scales are stored apart for rows, as"
                    " earlier releases of kvconnector do, and would bring values with wrong scales: update it"
                )
    return ""
