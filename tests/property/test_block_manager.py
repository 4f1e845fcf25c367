"""The block manager in any order of calls, against `block_model`."""

from itertools import chain, product, takewhile

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvconnector.cache.block_manager import (
    AllocStatus,
    OutOfBlocksError,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)
from tests.property.block_model import CPU, GPU, BlockModel, Request

# One choice per prompt, which costs a fraction of drawing token by token.
TAILS = [[*map(list, product((0, 1), repeat=length))] for length in range(5)]
# Few different prefixes, so that prompts often share one.
PROMPTS = st.sampled_from(
    [[0] * num_common + tail for num_common in range(1, 13) for tail in chain(*TAILS)]
).map(list)
MAX_SEQS = 8


class BlockManagerMachine(BlockModel, RuleBasedStateMachine):
    @initialize(data=st.data(), watermark=st.sampled_from([0.0, 0.2]), window=st.integers(1, 9))
    def start(self, data, watermark, window):
        self.set_up(data, watermark, window)
        self.waiting, self.next_id, self.now = [], 0, 0

    def new_id(self):
        self.next_id += 1
        return self.next_id

    def arrives(self, data, prompt, num_seqs=1, extra_keys=(), num_encoder_tokens=0):
        seqs = [Sequence(self.new_id(), prompt, extra_keys=extra_keys) for _ in range(num_seqs)]
        encoder = Sequence(0, range(num_encoder_tokens)) if num_encoder_tokens else None
        group = SequenceGroup(str(self.new_id()), seqs, encoder)
        request = Request(group, prompt, extra_keys, num_encoder_tokens)
        self.waiting.append(request)
        self.admit(data, request)
        return request

    @rule(data=st.data(), prompt=PROMPTS, num_seqs=st.integers(1, 3), keys=st.sampled_from("  a"))
    def arrive(self, data, prompt, num_seqs, keys):
        has_encoder = not (self.forgets or self.is_caching or self.is_ring)
        num_encoder_tokens = data.draw(st.integers(0, 5)) if has_encoder else 0
        self.arrives(data, prompt, num_seqs, tuple(keys.strip()), num_encoder_tokens)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def try_again(self, data):
        self.admit(data, data.draw(st.sampled_from(self.waiting)))

    @precondition(lambda self: self.is_caching)
    @rule(data=st.data(), prompt=PROMPTS)
    def share_a_prefix_and_take_all_other_blocks(self, data, prompt):
        """The prefix would be evicted first for the blocks that the prompt does not share."""
        for tokens in (prompt, [self.new_id()] * len(prompt)):
            request = self.arrives(data, tokens)
            if request in self.live:
                self.compute_tokens(request, request.num_slots)
                self.access(request)
                self.finish(request, *request.tokens)
        num_tokens = (self.num_free(GPU) - self.watermark_blocks) * self.block_size
        self.arrives(data, (prompt + [self.new_id()] * num_tokens)[: max(num_tokens, 1)])

    def admit(self, data, request):
        size, (seq, *_) = self.block_size, request.tokens
        lookahead = data.draw(st.integers(0, 2 * size), label="lookahead")
        resume_at = found = self.manager.find_cached_tokens(seq)
        assert found == (self.expected_hit(request) if self.is_caching else 0)
        if is_brought := data.draw(st.booleans(), label="is_brought"):
            resume_at = data.draw(st.integers(found, request.num_tokens - 1), label="resume_at")
        first = self.oldest(resume_at) // size
        full = range(first, min((request.num_tokens - 1) // size, resume_at // size))
        hits = [self.hit(request, seq, index) for index in full]
        hits = list(takewhile(lambda block: block is not None, hits)) if self.is_caching else []
        idle = set(hits) - set(self.owners(GPU))
        end = self.step_end(request, resume_at)
        held = self.num_blocks(end + lookahead) - first + self.num_blocks(len(request.encoder))
        arguments = {"resume_at": resume_at} if is_brought else {}
        status = self.manager.can_allocate(request.group, lookahead, **arguments)
        if held > self.totals[GPU] - self.watermark_blocks:
            assert status is AllocStatus.NEVER
            self.waiting.remove(request)
            return
        is_free = self.num_free(GPU) - (held - len(hits) + len(idle)) >= self.watermark_blocks
        assert status is (AllocStatus.OK if is_free else AllocStatus.LATER)
        if not is_free:
            return
        self.manager.allocate(request.group, lookahead, **arguments)
        self.waiting.remove(request)
        self.live.append(request)
        request.set_status(SequenceStatus.RUNNING)
        request.num_slots, request.num_computed = end, self.manager.get_num_cached_tokens(seq)
        tables = [self.manager.get_block_table(each) for each in request.tokens]
        assert tables == [tables[0]] * len(tables)
        assert tables[0][first : first + len(hits)] == hits
        self.hand_out(GPU, tables[0][first + len(hits) :] + self.cross_table(request))
        for position in request.encoder:
            self.write(request, self.cross_table(request), position, ("encoder", position))
        brought = range(max(request.num_computed, self.oldest(resume_at)), resume_at)
        self.compute_tokens(request, resume_at - request.num_computed, brought)

    @precondition(lambda self: self.on(GPU))
    @rule(data=st.data(), num_tokens=st.integers(1, 8))
    def compute(self, data, num_tokens):
        self.compute_tokens(data.draw(st.sampled_from(self.on(GPU))), num_tokens)

    @precondition(lambda self: any(self.lookahead_slots(request) for request in self.on(GPU)))
    @rule(data=st.data())
    def accept_drafts(self, data):
        """A step computes every token and some drafts after them, of which the first few are accepted."""
        request = data.draw(st.sampled_from([*filter(self.lookahead_slots, self.on(GPU))]))
        self.compute_tokens(request, request.num_slots)
        count = data.draw(st.integers(1, min(4, self.lookahead_slots(request))), label="accepted")
        for seq, tokens in request.tokens.items():
            accepted = data.draw(st.sampled_from(TAILS[count]))
            seq.append_tokens(accepted)
            tokens.extend(accepted)
            table = self.manager.get_block_table(seq)
            for position in self.in_memory(range(request.num_slots, request.num_tokens)):
                self.write(request, table, position, request.kv(seq, position))
        request.num_written = request.num_tokens

    def lookahead_slots(self, request):
        """Return how many drafts have slots that only their sequence writes. States of drafts are kept elsewhere."""
        if self.is_recurrent or self.is_ring or request.num_tokens > request.num_slots:
            return 0
        owners, lengths = self.owners(GPU), []
        for seq in request.tokens:
            table = self.manager.get_block_table(seq)
            end = self.block(request.num_slots)
            while end < len(table) and owners[table[end]] == 1:
                end += 1
            lengths.append(end * self.block_size)
        return max(0, min(lengths) - request.num_slots)

    @precondition(lambda self: self.on(GPU))
    @rule(data=st.data())
    def grow(self, data):
        request = data.draw(st.sampled_from(self.on(GPU)))
        if request.num_tokens == request.num_slots:
            count = data.draw(st.integers(0, 3))
            for seq, tokens in request.tokens.items():
                sampled = data.draw(st.sampled_from(TAILS[count]))
                seq.append_tokens(sampled)
                tokens.extend(sampled)
        for seq in request.tokens:
            self.manager.drop_left_behind(seq)
        lookahead = data.draw(st.integers(0, 2 * self.block_size), label="lookahead")
        needed = sum(len(self.expected_append(request, seq, lookahead)) for seq in request.tokens)
        can_append = self.manager.can_append_slots(request.group, lookahead)
        assert can_append is (needed <= self.num_free(GPU))
        if can_append:
            for seq in data.draw(st.permutations(list(request.tokens))):
                self.append(request, seq, lookahead)
            request.num_slots = max(request.num_slots, self.step_end(request, request.num_computed))
            self.access(request)
        elif self.manager.can_swap_out(request.group):
            self.swap(request, CPU)
        else:
            self.recompute_later(request)

    def append(self, request, seq, lookahead):
        before = self.manager.get_block_table(seq)
        expected = self.expected_append(request, seq, lookahead)
        copies = self.manager.append_slots(seq, lookahead)
        after = self.manager.get_block_table(seq)
        changed = [i for i, block in enumerate(after) if i >= len(before) or before[i] != block]
        assert changed == list(expected)
        copied = [index for index, is_copied in expected.items() if is_copied]
        assert copies == [(before[index], after[index]) for index in copied]
        self.hand_out(GPU, [after[index] for index in changed])
        self.copy(copies, GPU, GPU)

    @precondition(lambda self: self.is_caching)
    @rule()
    def reset_the_cache(self):
        free = [self.num_free(device) for device in self.totals]
        self.manager.reset_prefix_cache()
        assert [self.num_free(device) for device in self.totals] == free
        self.cache = {GPU: {}, CPU: {}}
        for request in self.live:
            request.is_outdated = True

    def access(self, request):
        self.now += 1
        for seq in request.tokens:
            self.manager.access_all_blocks_in_seq(seq, self.now)

    def recompute_later(self, request):
        first, *others = request.tokens
        self.finish(request, *others)
        self.manager.free(first)
        self.manager.free_cross(request.group)
        request.set_status(SequenceStatus.WAITING)
        request.num_written, request.is_outdated = 0, False
        self.live.remove(request)
        self.waiting.append(request)

    @precondition(lambda self: 0 < sum(len(each.tokens) for each in self.live) < MAX_SEQS)
    @rule(data=st.data())
    def fork(self, data):
        request = data.draw(st.sampled_from(self.live))
        parent = data.draw(st.sampled_from(list(request.tokens)))
        child = parent.fork(self.new_id())
        free = self.num_free(request.device)
        self.manager.fork(parent, child)
        assert self.num_free(request.device) == free
        request.group.add(child)
        request.tokens[child] = list(request.tokens[parent])

    def finish(self, request, *seqs):
        for seq in seqs:
            self.manager.free(seq)
            self.manager.free(seq)
            seq.status = SequenceStatus.FINISHED
            del request.tokens[seq]
        if not request.tokens:
            self.manager.free_cross(request.group)
            self.live.remove(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish_one(self, data):
        request = data.draw(st.sampled_from(self.live))
        self.finish(request, data.draw(st.sampled_from(list(request.tokens))))

    def swap(self, request, destination):
        source, cache = request.device, self.cache[request.device]
        tables = [self.manager.get_block_table(seq) for seq in request.tokens]
        dropped = [self.manager.get_first_block(seq) for seq in request.tokens]
        held = {
            block for table, first in zip(tables, dropped, strict=True) for block in table[first:]
        }
        held.update(self.cross_table(request))
        published = {block: kv for kv, block in cache.items() if block in held}
        found = {block for block, kv in published.items() if kv in self.cache[destination]}
        swap = self.manager.swap_out if destination is CPU else self.manager.swap_in
        copies = swap(request.group)
        moved = [block for block, _ in copies]
        assert sorted(moved) == sorted(held - found)
        assert len({block for _, block in copies}) == len(copies)
        self.copy(copies, source, destination)
        for source_id, destination_id in copies:
            if source_id in published:
                self.cache[destination].setdefault(published[source_id], destination_id)
        request.device = destination
        is_out = destination is CPU
        request.set_status(SequenceStatus.SWAPPED if is_out else SequenceStatus.RUNNING)

    @precondition(lambda self: len(self.on(GPU)) > len(self.on(CPU)))
    @rule(data=st.data())
    def swap_out(self, data):
        request = data.draw(st.sampled_from(self.on(GPU)))
        if self.manager.can_swap_out(request.group):
            self.swap(request, CPU)
        else:
            with pytest.raises(OutOfBlocksError):
                self.manager.swap_out(request.group)

    @precondition(lambda self: self.on(CPU))
    @rule(data=st.data())
    def swap_in(self, data):
        request = data.draw(st.sampled_from(self.on(CPU)))
        lookahead = data.draw(st.integers(0, 2 * self.block_size), label="lookahead")
        status = self.manager.can_swap_in(request.group, lookahead)
        if status is AllocStatus.OK:
            self.swap(request, GPU)
            assert self.manager.can_append_slots(request.group, lookahead)
        elif not self.on(GPU):
            assert status is AllocStatus.NEVER, "nothing else runs, so the wait would never end"

    @invariant()
    def nothing_leaks(self):
        for device, total in self.totals.items():
            owners = self.owners(device)
            assert set(owners) <= set(range(total))
            assert self.num_free(device) + len(owners) == total

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for request in self.live:
            for seq in request.tokens:
                table = self.manager.get_block_table(seq)
                assert len(table) >= self.num_blocks(request.num_slots)
                assert self.manager.get_num_computed_tokens(seq) == request.num_computed
                oldest, written = self.oldest(request.num_computed), request.num_written
                for position in self.in_memory(range(oldest, max(request.num_computed, written))):
                    assert self.read(request, table, position) == request.kv(seq, position)
            table = self.cross_table(request)
            for position in request.encoder:
                assert self.read(request, table, position) == ("encoder", position)

    @invariant()
    def a_shared_slot_has_one_content(self):
        contents = {}
        for request in self.live:
            for seq in request.tokens:
                table = self.manager.get_block_table(seq)
                for position in self.in_memory(range(request.num_computed, request.num_slots)):
                    slot = (request.device, table[self.block(position)], position)
                    assert contents.setdefault(slot, request.kv(seq, position)) == request.kv(
                        seq, position
                    )

    @invariant()
    def common_blocks_are_the_computed_prefix_of_all_tables(self):
        running = self.on(GPU)
        for requests in ([], running, *([request] for request in running)):
            seqs = [seq for request in requests for seq in request.tokens]
            tables = [self.manager.get_block_table(seq) for seq in seqs]
            num_tokens = min((each.num_computed for each in requests), default=0)
            expected = []
            if not (self.is_ring or any(self.manager.get_first_block(seq) for seq in seqs)):
                for index in range(num_tokens // self.block_size):
                    starts = {tuple(table[: index + 1]) for table in tables}
                    if len(starts) == 1:
                        (expected,) = map(list, starts)
            found = self.manager.get_common_computed_block_ids(seqs)
            assert found == expected


def of(**settings):
    """Return the machine's test case for managers with these settings."""
    return type("BlockManager", (BlockManagerMachine,), settings).TestCase


TestPlain = of()
TestCaching = of(is_caching=True)
TestWindow = of(has_window=True)
TestCachingWindow = of(is_caching=True, has_window=True)
TestCachingChunks = of(is_caching=True, has_chunks=True)
TestState = of(is_caching=True, is_recurrent=True)
TestRows = of(is_caching=True, row_tokens=2)
TestRing = of(is_ring=True)
