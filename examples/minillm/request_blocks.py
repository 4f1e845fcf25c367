"""Which blocks of every cache group each request holds: one `BlockSpaceManager` a group, changed together."""

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


@dataclass(slots=True, eq=False)
class _Books:
    """What the managers know of one request. A group of states has a sequence of its own, whose length means nothing.

    `kept_state` is the copy of the state behind `keep_state_at` tokens, once it is made.
    """

    tokens: TokenSequence
    groups: list[SequenceGroup]
    keep_state_at: int | None
    kept_state: TokenSequence | None = None


class RequestBlocks:
    """The blocks of all requests of one engine, on the device and in host memory. Moves no data: see `BlockMove`.

    Prefix caching works where all layers keep every token; otherwise it is off.

    Args:
        watermark: share of each pool that admission leaves free for the growth of running requests.
        scatter_seed: hand blocks out in a shuffled order, as after hours of traffic; None: ascending.
    """

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        sizes: Sequence[PoolSizes],
        *,
        watermark: float,
        prefix_caching: bool,
        scatter_seed: int | None,
    ) -> None:
        self.groups = tuple(groups)
        self.prefix_caching = prefix_caching and all(group.kind == "full" for group in groups)
        self.num_blocks = sum(size.num_blocks for size in sizes)
        self.swapped_blocks = 0
        """Blocks moved to host memory so far."""
        self._sizes = tuple(sizes)
        self._managers = [
            BlockSpaceManager(
                group.block_size,
                size.num_blocks,
                size.num_host_blocks,
                watermark,
                sliding_window=group.window,
                enable_caching=self.prefix_caching,
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
        return sum(manager.get_num_free_gpu_blocks() for manager in self._managers)

    def get_num_free_cpu_blocks(self) -> int:
        """Blocks of the host's pools without an owner."""
        return sum(manager.get_num_free_cpu_blocks() for manager in self._managers)

    def get_prefix_cache_hit_rate(self) -> float:
        """Share of full prompt blocks that were found, 0.0 to 1.0."""
        return self._managers[0].get_prefix_cache_hit_rate(Device.GPU)

    def can_ever_hold(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` tokens fits into pools that hold nothing else."""
        for group, manager, size in zip(self.groups, self._managers, self._sizes, strict=True):
            needed = -(-num_tokens // group.block_size)
            if group.window is not None:
                needed = min(needed, group.window // group.block_size + 2)
            if needed + manager.watermark_blocks > size.num_blocks:
                return False
        return True

    def add(self, request_id: str, prompt: Iterable[int], keep_state_at: int | None = None) -> None:
        """Enter a request, without blocks yet.

        `keep_state_at`: keep a copy of its state behind that many tokens, for a consumer to read.
        """
        tokens = TokenSequence(next(self._seq_ids), prompt)
        groups = [
            SequenceGroup(
                request_id,
                [TokenSequence(tokens.seq_id, [0]) if group.kind == "state" else tokens],
            )
            for group in self.groups
        ]
        self._books[request_id] = _Books(tokens, groups, keep_state_at)

    def append_token(self, request_id: str, token_id: int) -> None:
        """A sampled token: `grow` gives it a slot."""
        self._get(request_id).tokens.append_tokens([token_id])

    def can_allocate(self, request_id: str) -> AllocStatus:
        """Whether a request without blocks can have those for its known tokens: the worst of all groups."""
        books = self._get(request_id)
        found = {
            manager.can_allocate(group)
            for manager, group in zip(self._managers, books.groups, strict=True)
        }
        if AllocStatus.NEVER in found:
            return AllocStatus.NEVER
        return AllocStatus.LATER if AllocStatus.LATER in found else AllocStatus.OK

    def allocate(self, request_id: str) -> int:
        """Give a request its blocks, once `can_allocate` says OK. Returns the leading tokens that were found cached."""
        books = self._get(request_id)
        for manager, group in zip(self._managers, books.groups, strict=True):
            manager.allocate(group)
        self._set_status(books, SequenceStatus.RUNNING)
        return self._managers[0].get_num_cached_tokens(books.tokens) if self.prefix_caching else 0

    def grow(self, request_id: str, num_computed: int) -> list[BlockMove] | None:
        """Slots for all known tokens, and the copy of the state if it is due behind `num_computed` tokens.

        Returns:
            What must be copied before the next step; None, and no change, if too few blocks are free.
        """
        books = self._get(request_id)
        pairs = list(zip(self._managers, books.groups, strict=True))
        for index, (manager, group) in enumerate(pairs):
            is_due = self._is_state_due(index, books, num_computed)
            if not manager.can_append_slots(group) or (
                is_due and manager.get_num_free_gpu_blocks() < 1
            ):
                return None
        moves = []
        for index, (manager, group) in enumerate(pairs):
            if self._is_state_due(index, books, num_computed):
                self._keep_state(manager, group, books)
            copies = manager.append_slots(group.seqs()[0])
            moves += self._moves(index, "copy", copies)
        return moves

    def mark_computed(self, request_id: str, num_tokens: int) -> None:
        """The next `num_tokens` tokens are in the cache: full blocks can be found by other requests from now on."""
        if self.prefix_caching:
            self._managers[0].mark_blocks_as_computed(self._get(request_id).groups[0], num_tokens)

    def touch(self, request_id: str, now: float) -> None:
        """The request's blocks are used at `now`, which decides what is evicted first."""
        books = self._get(request_id)
        for manager, group in zip(self._managers, books.groups, strict=True):
            manager.access_all_blocks_in_seq(group.seqs()[0], now)

    def release(self, request_id: str) -> None:
        """Give the request's blocks up, wherever they are; it stays known."""
        books = self._get(request_id)
        for manager, group in zip(self._managers, books.groups, strict=True):
            for seq in group.seqs():
                manager.free(seq)
        books.groups = [SequenceGroup(request_id, [group.seqs()[0]]) for group in books.groups]
        books.kept_state = None
        self._set_status(books, SequenceStatus.WAITING)

    def remove(self, request_id: str) -> None:
        """Forget the request and free its blocks; nothing if it is unknown."""
        if request_id in self._books:
            self.release(request_id)
            del self._books[request_id]

    def can_swap_out(self, request_id: str) -> bool:
        """Whether host memory can take the request now."""
        books = self._get(request_id)
        return all(
            manager.can_swap_out(group)
            for manager, group in zip(self._managers, books.groups, strict=True)
        )

    def swap_out(self, request_id: str) -> list[BlockMove]:
        """Move a request to host memory; returns what to copy before the next step."""
        books = self._get(request_id)
        moves: list[BlockMove] = []
        for index, manager in enumerate(self._managers):
            moves += self._moves(index, "out", manager.swap_out(books.groups[index]))
        self._set_status(books, SequenceStatus.SWAPPED)
        self.swapped_blocks += sum(len(move.pairs) for move in moves)
        return moves

    def can_swap_in(self, request_id: str) -> bool:
        """Whether a swapped request can return now, and have slots for its known tokens."""
        books = self._get(request_id)
        return all(
            manager.can_swap_in(group) is AllocStatus.OK
            for manager, group in zip(self._managers, books.groups, strict=True)
        )

    def swap_in(self, request_id: str) -> list[BlockMove]:
        """Move a request back; returns what to copy before the next step."""
        books = self._get(request_id)
        moves: list[BlockMove] = []
        for index, manager in enumerate(self._managers):
            moves += self._moves(index, "in", manager.swap_in(books.groups[index]))
        self._set_status(books, SequenceStatus.RUNNING)
        return moves

    def tables(self, request_id: str) -> list[list[int]]:
        """The request's block ids by group, in token order; a window's repeat, a state has one."""
        books = self._get(request_id)
        return [self._table(index, group.seqs()[0]) for index, group in enumerate(books.groups)]

    def offer(self, request_id: str, num_tokens: int) -> BlockOffer | None:
        """What a consumer may read of the first `num_tokens` tokens, in the connector's terms.

        All but the last of them, which it computes itself. None if a window has moved on since.
        """
        books = self._get(request_id)
        block_ids, first_blocks = [], []
        for index, (layers, group) in enumerate(zip(self.groups, books.groups, strict=True)):
            seq, first = group.seqs()[0], 0
            if layers.kind == "state" and books.kept_state is not None:
                seq, first = books.kept_state, num_tokens - 2
            elif layers.window is not None:
                first_kept = self._managers[index].get_first_kept_token(seq)
                if first_kept > max(0, num_tokens - layers.window):
                    return None
                first = first_kept // layers.block_size
            table = self._table(index, seq)
            block_ids.append(table if layers.kind == "state" else table[first:])
            first_blocks.append(first)
        return BlockOffer(block_ids, first_blocks)

    def _get(self, request_id: str) -> _Books:
        books = self._books.get(request_id)
        if books is None:
            raise UnknownRequestError("the request has no blocks", request_id=request_id)
        return books

    def _set_status(self, books: _Books, status: SequenceStatus) -> None:
        for group in books.groups:
            group.seqs()[0].status = status

    def _is_state_due(self, index: int, books: _Books, num_computed: int) -> bool:
        return (
            self.groups[index].kind == "state"
            and books.kept_state is None
            and books.keep_state_at == num_computed
        )

    def _keep_state(self, manager: BlockSpaceManager, group: SequenceGroup, books: _Books) -> None:
        """Share the state's block with a sequence that never grows: the next token's slot copies it for the request."""
        running = group.seqs()[0]
        books.kept_state = running.fork(next(self._seq_ids))
        # it computes nothing more, but moves with its request
        books.kept_state.status = SequenceStatus.FINISHED
        manager.fork(running, books.kept_state)
        group.add(books.kept_state)
        running.append_tokens([0])

    def _table(self, index: int, seq: TokenSequence) -> list[int]:
        places = self._places[index]
        return [places[block_id] for block_id in self._managers[index].get_block_table(seq)]

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
