"""Which blocks of every cache group each request holds: the pools of all groups, changed together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvconnector.cache.block_manager import (
    AllocStatus,
    BlockCopy,
    BlockSpaceManager,
    Device,
    SequenceGroup,
    SequenceStatus,
)
from kvconnector.cache.block_manager import Sequence as TokenSequence
from kvconnector.errors import UnknownRequestError
from minillm.cache_groups import LayerGroup, PoolSizes
from minillm.messages import BlockMove, MoveKind


@dataclass(frozen=True, slots=True)
class BlockOffer:
    """Blocks for a consumer: `block_ids[group]` hold the sequence from its block `first_blocks[group]` on."""

    block_ids: list[list[int]]
    first_blocks: list[int]


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """Blocks to load into, as for `BlockOffer`; of each group, `computed_tokens[group]` need not be brought."""

    block_ids: list[list[int]]
    first_blocks: list[int]
    computed_tokens: list[int]


@dataclass(slots=True, eq=False)
class _Books:
    """One request: its tokens, and behind how many of them its states are kept for a consumer.

    `kept` is a fork of the tokens as they were there, with the blocks that held these states.
    """

    tokens: TokenSequence
    keep_state_at: int | None
    kept: TokenSequence | None = None

    @property
    def group(self) -> SequenceGroup:
        """All that owns blocks."""
        seqs = [self.tokens] if self.kept is None else [self.tokens, self.kept]
        return SequenceGroup(f"sequence {self.tokens.seq_id}", seqs)

    def first_stop(self, resume_at: int) -> int | None:
        """Where a step that begins at `resume_at` must end: in front of a token that replaces kept states."""
        if self.keep_state_at is None or self.keep_state_at <= resume_at:
            return None
        return self.keep_state_at


class RequestBlocks:
    """The blocks of all requests of one engine, on the device and in host memory. Moves no data: see `BlockMove`.

    Each cache group has a block manager of its own. A prefix is hit where every group has what the next token needs of
    it.

    Args:
        watermark: share of each pool that admission leaves free for the growth of running requests.
        step_tokens: most tokens that one step computes.
        lookahead: slots that a step takes behind its tokens, so that most steps change no block table.
        scatter_seed: hand blocks out in a shuffled order, as after hours of traffic; None: ascending.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        sizes: Sequence[PoolSizes],
        *,
        watermark: float,
        step_tokens: int,
        prefix_caching: bool,
        scatter_seed: int | None,
        lookahead: int = 0,
    ) -> None:
        self.groups = tuple(groups)
        self.num_blocks = sum(size.num_blocks for size in sizes)
        self.swapped_blocks = 0
        """Blocks moved to host memory so far."""
        self.copied_blocks = 0
        """Shared blocks that were copied because one of their owners wrote."""
        self._lookahead = lookahead
        self._pools = [
            BlockSpaceManager(
                group.block_size,
                size.num_blocks,
                size.num_host_blocks,
                watermark,
                sliding_window=group.window,
                is_recurrent=group.kind == "state",
                max_step_tokens=step_tokens + lookahead,
                enable_caching=prefix_caching,
            )
            for group, size in zip(groups, sizes, strict=True)
        ]
        self._places = [list(range(size.num_blocks)) for size in sizes]
        if scatter_seed is not None:
            for places in self._places:
                random.Random(scatter_seed).shuffle(places)
        self._seq_ids = itertools.count()
        self._books: dict[str, _Books] = {}

    @property
    def has_states(self) -> bool:
        """Whether some layers keep one state per request, which the next token replaces."""
        return any(group.kind == "state" for group in self.groups)

    def get_num_free_gpu_blocks(self) -> int:
        """Blocks of the device's pools without an owner."""
        return sum(pool.get_num_free_gpu_blocks() for pool in self._pools)

    def get_num_free_cpu_blocks(self) -> int:
        """Blocks of the host's pools without an owner."""
        return sum(pool.get_num_free_cpu_blocks() for pool in self._pools)

    def get_prefix_cache_hit_rate(self) -> float:
        """Share of full prompt blocks that were found by the first group, 0.0 to 1.0."""
        return self._pools[0].get_prefix_cache_hit_rate(Device.GPU)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` tokens fits into pools that hold nothing else."""
        return all(pool.fits_alone(num_tokens + self._lookahead) for pool in self._pools)

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        keep_state_at: int | None = None,
        *,
        salt: str = "",
    ) -> None:
        """Enter a request, without blocks yet. Only requests with the same salt find its blocks again.

        `keep_state_at`: keep its state behind that many tokens, for a consumer to read.
        """
        tokens = TokenSequence(next(self._seq_ids), prompt, extra_keys=[salt] if salt else ())
        self._books[request_id] = _Books(tokens, keep_state_at)

    def append_token(self, request_id: str, token_id: int) -> None:
        """A sampled token: `grow` gives it a slot."""
        self._get(request_id).tokens.append_tokens([token_id])

    def fork(self, request_id: str, child_id: str) -> None:
        """Enter a request that goes on as another one does, and shares its blocks until one of them writes."""
        parent = self._get(request_id).tokens
        child = parent.fork(next(self._seq_ids))
        for pool in self._pools:
            pool.fork(parent, child)
        self._books[child_id] = _Books(child, None)

    def find_hit(self, request_id: str) -> int:
        """Leading tokens behind which a request without blocks could go on at once."""
        books = self._get(request_id)
        # the last token is computed in any case, and so is the state that a consumer waits for
        hit = books.tokens.num_tokens - 1
        if books.keep_state_at is not None:
            hit = min(hit, books.keep_state_at)
        while True:
            common = hit
            for pool in self._pools:
                common = pool.find_cached_tokens(books.tokens, common)
            if common == hit:
                return hit
            hit = common

    def can_allocate(self, request_id: str, resume_at: int) -> AllocStatus:
        """Whether a request can have blocks to go on behind `resume_at` tokens: the worst of all groups."""
        books = self._get(request_id)
        stop = books.first_stop(resume_at)
        found = {
            pool.can_allocate(books.group, resume_at=resume_at, num_tokens=stop)
            for pool in self._pools
        }
        if AllocStatus.NEVER in found:
            return AllocStatus.NEVER
        return AllocStatus.LATER if AllocStatus.LATER in found else AllocStatus.OK

    def allocate(self, request_id: str, resume_at: int) -> LoadTarget:
        """Give a request its blocks, once `can_allocate` says OK. Returns where what is still missing in front of
        `resume_at` must be loaded.
        """
        books = self._get(request_id)
        tokens = books.tokens
        for pool in self._pools:
            pool.allocate(books.group, resume_at=resume_at, num_tokens=books.first_stop(resume_at))
        tokens.status = SequenceStatus.RUNNING
        block_ids, first_blocks = [], []
        for index, (group, pool) in enumerate(zip(self.groups, self._pools, strict=True)):
            first = pool.get_first_block(tokens)
            table = self._table(index, tokens)[first:]
            # a state's block holds many tokens here, and one to the connector, which knows where that is
            block_ids.append(table[:1] if group.kind == "state" else table)
            first_blocks.append(first)
        computed = [pool.get_num_cached_tokens(tokens) for pool in self._pools]
        return LoadTarget(block_ids, first_blocks, computed)

    def grow(self, request_id: str, num_computed: int, stop: int) -> list[BlockMove] | None:
        """Slots for the tokens `[num_computed, stop)` of the next step, and the state set aside if it is due.

        Returns:
            What must be copied before the step; None if too few blocks are free.
        """
        books = self._get(request_id)
        for pool in self._pools:
            pool.drop_left_behind(books.tokens)
        if books.kept is None and books.keep_state_at == num_computed:
            self._keep_states(books)
        if not all(
            pool.can_append_slots(books.group, self._lookahead, num_tokens=stop)
            for pool in self._pools
        ):
            return None
        moves = []
        for index, pool in enumerate(self._pools):
            copies = pool.append_slots(books.tokens, self._lookahead, num_tokens=stop)
            self.copied_blocks += len(copies)
            moves += self._moves(index, "copy", copies)
        return moves

    def _keep_states(self, books: _Books) -> None:
        """Let a fork own the states as they are, so that the request goes on with copies."""
        books.kept = books.tokens.fork(next(self._seq_ids))
        books.kept.status = SequenceStatus.FINISHED
        for group, pool in zip(self.groups, self._pools, strict=True):
            if group.kind == "state":
                pool.fork(books.tokens, books.kept)

    def mark_computed(self, request_id: str, num_computed: int) -> None:
        """So many leading tokens are in the cache: full blocks can be found by other requests from now on."""
        books = self._get(request_id)
        for pool in self._pools:
            added = num_computed - pool.get_num_computed_tokens(books.tokens)
            pool.mark_blocks_as_computed(books.group, added)

    def touch(self, request_id: str, now: float) -> None:
        """The request's blocks are used at `now`, which decides what is evicted first."""
        tokens = self._get(request_id).tokens
        for pool in self._pools:
            pool.access_all_blocks_in_seq(tokens, now)

    def release(self, request_id: str) -> None:
        """Give the request's blocks up, wherever they are; it stays known."""
        books = self._get(request_id)
        for pool in self._pools:
            for seq in books.group.seqs():
                pool.free(seq)
        books.kept = None
        books.tokens.status = SequenceStatus.WAITING

    def remove(self, request_id: str) -> None:
        """Forget the request and free its blocks; nothing if it is unknown."""
        if request_id in self._books:
            self.release(request_id)
            del self._books[request_id]

    def can_swap_out(self, request_id: str) -> bool:
        """Whether host memory can take the request now."""
        group = self._get(request_id).group
        return all(pool.can_swap_out(group) for pool in self._pools)

    def swap_out(self, request_id: str) -> list[BlockMove]:
        """Move a request to host memory; returns what to copy before the next step."""
        books = self._get(request_id)
        moves: list[BlockMove] = []
        for index, pool in enumerate(self._pools):
            # what it would drop before its next step must not count as held when it wants to return
            pool.drop_left_behind(books.tokens)
            moves += self._moves(index, "out", pool.swap_out(books.group))
        books.tokens.status = SequenceStatus.SWAPPED
        self.swapped_blocks += sum(len(move.pairs) for move in moves)
        return moves

    def can_swap_in(self, request_id: str) -> bool:
        """Whether a swapped request can return now, and have slots for what comes next."""
        group = self._get(request_id).group
        return all(pool.can_swap_in(group) is AllocStatus.OK for pool in self._pools)

    def swap_in(self, request_id: str) -> list[BlockMove]:
        """Move a request back; returns what to copy before the next step."""
        books = self._get(request_id)
        moves: list[BlockMove] = []
        for index, pool in enumerate(self._pools):
            moves += self._moves(index, "in", pool.swap_in(books.group))
        books.tokens.status = SequenceStatus.RUNNING
        return moves

    def tables(self, request_id: str) -> list[list[int]]:
        """The request's block ids by group, in token order; of layers that forget, the first ones mean nothing."""
        tokens = self._get(request_id).tokens
        return [self._table(index, tokens) for index in range(len(self.groups))]

    def offer(self, request_id: str, num_tokens: int) -> BlockOffer | None:
        """What a consumer may read of the first `num_tokens` tokens, in the connector's terms.

        All but the last of them, which it computes itself. None if a window has moved on since.
        """
        books = self._get(request_id)
        block_ids, first_blocks = [], []
        for index, (group, pool) in enumerate(zip(self.groups, self._pools, strict=True)):
            first = pool.get_first_block(books.tokens)
            table = self._table(index, books.tokens)[first : -(-num_tokens // group.block_size)]
            if group.kind == "state" and books.kept and books.keep_state_at:
                kept = (books.keep_state_at - 1) // group.block_size
                table, first = [self._table(index, books.kept)[kept]], books.keep_state_at - 1
            elif group.kind == "state":
                table = table[:1]
            elif group.window is not None and first * group.block_size > max(
                0, num_tokens - group.window
            ):
                return None
            block_ids.append(table)
            first_blocks.append(first)
        return BlockOffer(block_ids, first_blocks)

    def _get(self, request_id: str) -> _Books:
        books = self._books.get(request_id)
        if books is None:
            raise UnknownRequestError("the request has no blocks", request_id=request_id)
        return books

    def _table(self, index: int, tokens: TokenSequence) -> list[int]:
        places = self._places[index]
        return [places[block_id] for block_id in self._pools[index].get_block_table(tokens)]

    def _moves(self, index: int, kind: MoveKind, copies: Iterable[BlockCopy]) -> list[BlockMove]:
        places = self._places[index]
        pairs = [
            (
                source if kind == "in" else places[source],
                target if kind == "out" else places[target],
            )
            for source, target in copies
        ]
        return [BlockMove(index, kind, pairs)] if pairs else []
