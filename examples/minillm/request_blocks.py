"""The blocks that each request holds in every cache group: the pools of all groups, changed together."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

from kvconnector.cache.block_manager import (
    AllocStatus,
    BlockCopy,
    BlockSpaceManager,
    Device,
    SequenceStatus,
)
from kvconnector.cache.block_manager import Sequence as TokenSequence
from kvconnector.errors import UnknownRequestError
from kvconnector.planning import KeepsAll
from minillm.cache_groups import LayerGroup, PoolSizes
from minillm.messages import BlockMove, MoveKind, block_number
from minillm.request_books import BlockOffer, LoadTarget, RequestBooks, forgetting


class RequestBlocks:
    """The blocks of all requests of one engine, on the device and in host memory. Moves no data: see `BlockMove`.

    Each cache group has a pool with a block manager of its own, except cross-attention, whose blocks come from the
    decoder's pool and belong to the whole request. A prefix is hit if every group has what the next token needs.

    Args:
        groups: The model's cache groups; those with pools of their own in the order of `sizes`.
        sizes: Numbers of blocks of the pools.
        watermark: Share of each pool, 0 to 1, that admission leaves free for running requests to grow into.
        step_tokens: Most tokens that one step computes.
        lookahead: Slots that a step allocates beyond its tokens, so that most steps change no block table.
        scatter_seed: Allocates blocks in a shuffled order, as after hours of traffic; None: ascending.
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
        """Number of blocks moved to host memory so far."""
        self.copied_blocks = 0
        """Number of shared blocks that were copied because one of their owners wrote."""
        self.common_reads = 0
        """Number of block reads saved, since several sequences of a step shared the blocks."""
        self._lookahead = lookahead
        self._pools = [
            BlockSpaceManager(
                groups[pool].block_size,
                size.num_blocks,
                size.num_host_blocks,
                watermark,
                **forgetting(groups[pool].retention),
                max_step_tokens=step_tokens + lookahead,
                enable_caching=prefix_caching,
            )
            for pool, size in enumerate(sizes)
        ]
        self._keep_all = [
            isinstance(groups[pool].retention, KeepsAll) for pool in range(len(sizes))
        ]
        self._places = [list(range(size.num_blocks)) for size in sizes]
        if scatter_seed is not None:
            for places in self._places:
                random.Random(scatter_seed).shuffle(places)
        self._seq_ids = itertools.count()
        self._books: dict[str, RequestBooks] = {}
        self._invalid: set[int] = set()

    @property
    def keeps_all_tokens(self) -> bool:
        """Returns True if a request has all its tokens' blocks until it ends."""
        return all(self._keep_all)

    @property
    def has_states(self) -> bool:
        """Returns True if some layers keep one state per request, which the next token replaces."""
        return any(group.kind == "state" for group in self.groups)

    def get_num_free_gpu_blocks(self) -> int:
        """Number of blocks of the device's pools without an owner."""
        return sum(pool.get_num_free_gpu_blocks() for pool in self._pools)

    def get_num_free_cpu_blocks(self) -> int:
        """Number of blocks of the host's pools without an owner."""
        return sum(pool.get_num_free_cpu_blocks() for pool in self._pools)

    def get_prefix_cache_hit_rate(self) -> float:
        """Share of full prompt blocks that were found by the first group, 0.0 to 1.0."""
        return self._pools[0].get_prefix_cache_hit_rate(Device.GPU)

    def reset_prefix_cache(self) -> None:
        """Let no later request reuse what is cached now, as after a change of the model's weights."""
        for pool in self._pools:
            pool.reset_prefix_cache()

    def can_ever_hold(self, num_tokens: int, num_encoder_tokens: int = 0) -> bool:
        """Returns True if a request of `num_tokens` tokens fits into empty pools."""
        num_slots = num_tokens + self._lookahead
        return all(pool.fits_alone(num_slots, num_encoder_tokens) for pool in self._pools)

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        keep_state_at: int | None = None,
        *,
        num_answers: int = 1,
        encoder_prompt: Sequence[int] = (),
        salt: str = "",
    ) -> None:
        """Add a request, without blocks yet.

        Args:
            request_id: Id of the request, and of all its answers until they begin.
            prompt: Its tokens.
            keep_state_at: Number of tokens after which its state is kept, for a consumer to read.
            num_answers: Number of sequences that begin with the prompt; see `fork`.
            encoder_prompt: The encoder's input, for a model that has one.
            salt: Only requests with the same salt reuse its blocks.
        """
        tokens = TokenSequence(next(self._seq_ids), prompt, extra_keys=[salt] if salt else ())
        siblings = [tokens.fork(next(self._seq_ids)) for _ in range(1, num_answers)]
        encoder = TokenSequence(next(self._seq_ids), encoder_prompt) if encoder_prompt else None
        self._books[request_id] = RequestBooks(tokens, siblings, encoder, keep_state_at)

    def append_token(self, request_id: str, token_id: int) -> None:
        """Append a sampled token; `grow` gives it a slot."""
        self._get(request_id).tokens.append_tokens([token_id])

    def fork(self, request_id: str, child_id: str) -> None:
        """Let another answer to a computed prompt go its own way. It shares blocks until one of the two writes."""
        books = self._get(request_id)
        child = books.siblings.pop(0)
        for pool, keeps_all in zip(self._pools, self._keep_all, strict=True):
            if not keeps_all:
                pool.fork(books.tokens, child)
        self._books[child_id] = RequestBooks(child, [], None, None)

    def find_hit(self, request_id: str) -> int:
        """Return the number of leading tokens after which a request without blocks could continue at once."""
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
        """Return the worst answer of all groups for a request that continues after `resume_at` tokens."""
        books = self._get(request_id)
        stop = books.first_stop(resume_at)
        lookahead = self._lookahead_of(books)
        found = {
            pool.can_allocate(books.group, lookahead, resume_at=resume_at, num_tokens=stop)
            for pool in self._pools
        }
        if AllocStatus.NEVER in found:
            return AllocStatus.NEVER
        return AllocStatus.LATER if AllocStatus.LATER in found else AllocStatus.OK

    def allocate(self, request_id: str, resume_at: int) -> LoadTarget:
        """Give a request its blocks, once `can_allocate` says OK. Returns the blocks into which tokens that are missing
        before `resume_at` must be loaded.
        """
        books = self._get(request_id)
        tokens = books.tokens
        for pool, keeps_all in zip(self._pools, self._keep_all, strict=True):
            # where blocks are taken and dropped with each step, siblings have none until they begin
            taking = books.group if keeps_all else books.first
            stop = books.first_stop(resume_at)
            lookahead = self._lookahead_of(books)
            pool.allocate(taking, lookahead, resume_at=resume_at, num_tokens=stop)
        books.set_status(SequenceStatus.RUNNING)
        block_ids, first_blocks, computed = [], [], []
        for group, table in zip(self.groups, self._tables(books), strict=True):
            is_cross = group.kind == "cross"
            pool = self._pools[group.pool]
            first = 0 if is_cross else pool.get_first_block(tokens)
            # a state's block holds many tokens here but one for the connector, which knows where that is
            block_ids.append(table[first:][:1] if group.kind == "state" else table[first:])
            first_blocks.append(first)
            computed.append(0 if is_cross else pool.get_num_cached_tokens(tokens))
        return LoadTarget(block_ids, first_blocks, computed)

    def grow(self, request_id: str, num_computed: int, stop: int) -> list[BlockMove] | None:
        """Allocate slots for the tokens `[num_computed, stop)` of the next step, and set the state aside if it is due.

        Returns:
            Copies to make before the step; None if too few blocks are free.
        """
        books = self._get(request_id)
        for pool in self._pools:
            pool.drop_left_behind(books.tokens)
        if books.kept is None and books.keep_state_at == num_computed:
            self._keep_states(books)
        lookahead = self._lookahead_of(books)
        if not all(
            pool.can_append_slots(books.group, lookahead, num_tokens=stop) for pool in self._pools
        ):
            return None
        moves = []
        for index, pool in enumerate(self._pools):
            copies = pool.append_slots(books.tokens, lookahead, num_tokens=stop)
            self.copied_blocks += len(copies)
            moves += self._moves(index, "copy", copies)
        return moves

    def _keep_states(self, books: RequestBooks) -> None:
        """Let a fork own the states as they are, so that the request continues with copies."""
        books.kept = books.tokens.fork(next(self._seq_ids))
        books.kept.status = SequenceStatus.FINISHED
        for group in self.groups:
            if group.kind == "state":
                self._pools[group.pool].fork(books.tokens, books.kept)

    def mark_computed(self, request_id: str, num_computed: int) -> None:
        """Record that the first `num_computed` tokens are in the cache: other requests can reuse their full blocks."""
        books = self._get(request_id)
        for pool in self._pools:
            added = num_computed - pool.get_num_computed_tokens(books.tokens)
            pool.mark_blocks_as_computed(books.group, added)

    def mark_invalid(self, blocks: Iterable[int]) -> None:
        """Record blocks, by `block_number`, that will not be filled by a load that has not ended on all ranks."""
        self._invalid.update(blocks)

    def take_valid_tokens(self, request_id: str, num_tokens: int) -> int:
        """Return how many tokens precede a loaded request's first invalid block, and unmark its blocks."""
        if not self._invalid:
            return num_tokens
        books = self._get(request_id)
        for index, (group, table) in enumerate(zip(self.groups, self._tables(books), strict=True)):
            is_cross = group.kind == "cross"
            first = 0 if is_cross else self._pools[group.pool].get_first_block(books.tokens)
            for place, block_id in enumerate(table[first:], first):
                number = block_number(index, block_id, len(self.groups))
                if number in self._invalid:
                    self._invalid.discard(number)
                    # every token of the decoder depends on the encoder's output
                    num_tokens = min(num_tokens, 0 if is_cross else place * group.block_size)
        return num_tokens

    def touch(self, request_id: str, now: float) -> None:
        """Record that the request's blocks are used at `now`: the least recently used are evicted first."""
        tokens = self._get(request_id).tokens
        for pool in self._pools:
            pool.access_all_blocks_in_seq(tokens, now)

    def release(self, request_id: str) -> None:
        """Free the request's blocks, on the device or the host; the request stays known."""
        books = self._get(request_id)
        for pool in self._pools:
            for seq in books.group.seqs():
                pool.free(seq)
            pool.free_cross(books.group)
        books.kept = None
        books.set_status(SequenceStatus.WAITING)

    def remove(self, request_id: str) -> None:
        """Forget the request and free its blocks. Does nothing if it is unknown."""
        if request_id in self._books:
            self.release(request_id)
            del self._books[request_id]

    def can_swap_out(self, request_id: str) -> bool:
        """Returns True if host memory can take the request now."""
        group = self._get(request_id).group
        return all(pool.can_swap_out(group) for pool in self._pools)

    def swap_out(self, request_id: str) -> list[BlockMove]:
        """Move a request to host memory; returns what to copy before the next step."""
        books = self._get(request_id)
        moves: list[BlockMove] = []
        for index, pool in enumerate(self._pools):
            # blocks that it would drop before its next step must not count when it is swapped in
            pool.drop_left_behind(books.tokens)
            moves += self._moves(index, "out", pool.swap_out(books.group))
        books.set_status(SequenceStatus.SWAPPED)
        self.swapped_blocks += sum(len(move.pairs) for move in moves)
        return moves

    def can_swap_in(self, request_id: str) -> bool:
        """Returns True if a swapped request can return now, with slots for its next tokens."""
        books = self._get(request_id)
        return all(
            pool.can_swap_in(books.group, self._lookahead_of(books)) is AllocStatus.OK
            for pool in self._pools
        )

    def swap_in(self, request_id: str) -> list[BlockMove]:
        """Move a request back; returns what to copy before the next step."""
        books = self._get(request_id)
        moves: list[BlockMove] = []
        for index, pool in enumerate(self._pools):
            moves += self._moves(index, "in", pool.swap_in(books.group))
        books.set_status(SequenceStatus.RUNNING)
        return moves

    def common_blocks(self, request_ids: Sequence[str]) -> list[int]:
        """Return the number of leading computed blocks that these requests share, by group: a batch reads them once. In
        cross-attention they share none.
        """
        seqs = [self._get(request_id).tokens for request_id in request_ids]
        common = [len(pool.get_common_computed_block_ids(seqs)) for pool in self._pools]
        self.common_reads += sum(common) * (len(seqs) - 1)
        return [0 if group.kind == "cross" else common[group.pool] for group in self.groups]

    def tables(self, request_id: str) -> list[list[int]]:
        """Return the request's block ids by group, in token order; first ones of layers that forget mean nothing."""
        return self._tables(self._get(request_id))

    def offer(self, request_id: str, num_tokens: int) -> BlockOffer | None:
        """Describe all but the last of the first `num_tokens` tokens in the connector's terms, to offer them to a
        consumer, which computes the last one itself. Returns None if a window has moved on since.
        """
        books = self._get(request_id)
        offered = [self._offered(group, books, num_tokens) for group in self.groups]
        whole = [each for each in offered if each is not None]
        if len(whole) < len(offered):
            return None
        return BlockOffer([ids for ids, _ in whole], [first for _, first in whole])

    def _offered(
        self, group: LayerGroup, books: RequestBooks, num_tokens: int
    ) -> tuple[list[int], int] | None:
        """Return a group's blocks and where they begin, or None if it has forgotten tokens that a consumer needs."""
        if group.kind == "cross":
            return self._cross_table(group, books), 0
        if group.kind == "state" and books.kept and books.keep_state_at:
            kept = books.keep_state_at - 1
            return [self._table(group.pool, books.kept)[kept // group.block_size]], kept
        table = self._table(group.pool, books.tokens)
        first = self._pools[group.pool].get_first_block(books.tokens)
        if group.kind == "state":
            return table[first : first + 1], first
        if first * group.block_size > group.retention.missing(0, num_tokens - 1).start:
            return None
        return table[first : -(-num_tokens // group.block_size)], first

    def _lookahead_of(self, books: RequestBooks) -> int:
        """Return the number of slots to allocate beyond the tokens."""
        # one beyond the prompt would copy a block that is also written for their siblings
        return 0 if books.siblings else self._lookahead

    def _get(self, request_id: str) -> RequestBooks:
        books = self._books.get(request_id)
        if books is None:
            raise UnknownRequestError("the request has no blocks", request_id=request_id)
        return books

    def _tables(self, books: RequestBooks) -> list[list[int]]:
        return [
            self._cross_table(group, books)
            if group.kind == "cross"
            else self._table(group.pool, books.tokens)
            for group in self.groups
        ]

    def _table(self, pool: int, tokens: TokenSequence) -> list[int]:
        places = self._places[pool]
        return [places[block_id] for block_id in self._pools[pool].get_block_table(tokens)]

    def _cross_table(self, group: LayerGroup, books: RequestBooks) -> list[int]:
        """Return the blocks of the encoder's input, which are the request's."""
        places, pool = self._places[group.pool], self._pools[group.pool]
        return [places[block_id] for block_id in pool.get_cross_block_table(books.group)]

    def _moves(self, pool: int, kind: MoveKind, copies: Iterable[BlockCopy]) -> list[BlockMove]:
        places = self._places[pool]
        pairs = [
            (
                source if kind == "in" else places[source],
                target if kind == "out" else places[target],
            )
            for source, target in copies
        ]
        return [BlockMove(pool, kind, pairs)] if pairs else []
