"""The block manager against a model: a modelled memory that all copies and writes go through.

The modelled KV of a token depends on the request's extra keys and all tokens up to it, as in a real
cache, so whatever a sequence reads through its block table shows whether the blocks really are its own.
"""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvconnector.cache.block_manager import (
    AllocStatus,
    BlockSpaceManager,
    Device,
    OutOfBlocksError,
    Sequence,
    SequenceGroup,
    SequenceStatus,
)

TOKENS = st.integers(0, 1)
# Few different beginnings, so that prompts often share a prefix.
PROMPTS = st.builds(
    lambda num_common, tail: [0] * num_common + tail,
    st.integers(1, 12),
    st.lists(TOKENS, max_size=4),
)
MAX_SEQS = 8
STALE = "stale"


def kv(seq, position):
    return seq.block_hashes(1, position + 1)[position]


class Request:
    """What the model knows of one group: all its sequences have the same length and progress."""

    def __init__(self, group):
        self.group = group
        self.device = Device.GPU
        self.num_written = 0
        self.num_slots = 0  # tokens that have a slot

    @property
    def seqs(self):
        return [seq for seq in self.group.seqs() if not seq.is_finished]

    @property
    def num_tokens(self):
        return self.seqs[0].num_tokens

    @property
    def num_uncomputed(self):
        return self.num_slots - self.num_written

    def set_status(self, status):
        for seq in self.seqs:
            seq.status = status


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(
        data=st.data(),
        watermark=st.sampled_from([0.0, 0.2]),
        window=st.none() | st.integers(1, 9),
        is_caching=st.booleans(),
    )
    def start(self, data, watermark, window, is_caching):
        block_size = data.draw(st.integers(1, 4), label="block_size")
        num_gpu_blocks = data.draw(st.integers(3, 14), label="num_gpu_blocks")
        num_cpu_blocks = data.draw(st.integers(0, 10), label="num_cpu_blocks")
        self.block_size = block_size
        self.window, self.is_caching = window, is_caching
        self.step_tokens = data.draw(st.integers(1, 6), label="step_tokens")
        self.totals = {Device.GPU: num_gpu_blocks, Device.CPU: num_cpu_blocks}
        self.manager = BlockSpaceManager(
            block_size,
            num_gpu_blocks,
            num_cpu_blocks,
            watermark,
            sliding_window=self.window,
            max_step_tokens=self.step_tokens,
            enable_caching=self.is_caching,
        )
        self.watermark_blocks = int(watermark * num_gpu_blocks)
        self.memory = {
            device: [[STALE] * block_size for _ in range(total)]
            for device, total in self.totals.items()
        }
        self.live = []
        self.waiting = []
        self.next_id = 0
        self.now = 0.0

    def new_id(self):
        self.next_id += 1
        return self.next_id

    def num_free(self, device):
        if device is Device.GPU:
            return self.manager.get_num_free_gpu_blocks()
        return self.manager.get_num_free_cpu_blocks()

    def on(self, device):
        return [request for request in self.live if request.device is device]

    def uncomputed(self):
        return [request for request in self.on(Device.GPU) if request.num_uncomputed]

    def copy(self, copies, source, destination):
        for source_id, destination_id in copies:
            self.memory[destination][destination_id] = list(self.memory[source][source_id])

    def write(self, table, position, value):
        block_id = table[position // self.block_size]
        self.memory[Device.GPU][block_id][position % self.block_size] = value

    def blocks_for(self, num_tokens):
        return -(-num_tokens // self.block_size)

    def step_end(self, request, num_written):
        step = request.num_tokens if self.window is None else self.step_tokens
        return min(request.num_tokens, num_written + step)

    def oldest_needed(self, request):
        """The oldest token that a token yet to be computed sees."""
        return 0 if self.window is None else max(0, request.num_written - self.window + 1)

    @rule(data=st.data(), prompt=PROMPTS, num_seqs=st.integers(1, 3))
    def arrive(self, data, prompt, num_seqs):
        extra_keys = data.draw(st.sampled_from([(), (), ("adapter",)]), label="extra_keys")
        seqs = [Sequence(self.new_id(), prompt, extra_keys=extra_keys) for _ in range(num_seqs)]
        request = Request(SequenceGroup(str(self.new_id()), seqs))
        self.waiting.append(request)
        self.admit(request)

    @precondition(lambda self: self.is_caching)
    @rule(prompt=PROMPTS)
    def share_a_prefix_and_take_all_other_blocks(self, prompt):
        """The prefix is what would be evicted first for the blocks that the prompt does not share."""
        for tokens in (prompt, [self.new_id()] * len(prompt)):
            self.run_and_free(tokens)
        num_tokens = (self.num_free(Device.GPU) - self.watermark_blocks) * self.block_size
        prompt = (prompt + [self.new_id()] * num_tokens)[: max(num_tokens, 1)]
        self.waiting.append(
            Request(SequenceGroup(str(self.new_id()), [Sequence(self.new_id(), prompt)]))
        )
        self.admit(self.waiting[-1])

    def run_and_free(self, prompt):
        request = Request(SequenceGroup(str(self.new_id()), [Sequence(self.new_id(), prompt)]))
        self.waiting.append(request)
        self.admit(request)
        if request in self.live:
            self.compute_tokens(request, request.num_uncomputed)
            self.access(request)
            self.manager.free(request.seqs[0])
            self.live.remove(request)

    def admit(self, request):
        group = request.group
        resume_at = self.manager.find_cached_tokens(request.seqs[0])
        assert resume_at == 0 or self.is_caching
        end = self.step_end(request, resume_at)
        first = max(0, resume_at - (self.window or resume_at + 1) + 1) // self.block_size
        required = self.blocks_for(end) - first
        free = self.num_free(Device.GPU)
        status = self.manager.can_allocate(group)
        never = required > self.totals[Device.GPU] - self.watermark_blocks
        assert (status is AllocStatus.NEVER) == never
        if free - required >= self.watermark_blocks:
            assert status is not AllocStatus.LATER
        elif not self.is_caching:
            assert status is not AllocStatus.OK
        if status is not AllocStatus.OK:
            if never:
                self.waiting.remove(request)
            return
        self.manager.allocate(group)
        assert self.num_free(Device.GPU) >= self.watermark_blocks
        self.waiting.remove(request)
        self.live.append(request)
        request.set_status(SequenceStatus.RUNNING)
        request.num_slots = end
        request.num_written = self.manager.get_num_cached_tokens(request.seqs[0])
        assert request.num_written == resume_at

    def compute_tokens(self, request, num_tokens):
        for seq in request.seqs:
            table = self.manager.get_block_table(seq)
            for position in range(request.num_written, request.num_written + num_tokens):
                self.write(table, position, kv(seq, position))
        self.manager.mark_blocks_as_computed(request.group, num_tokens)
        request.num_written += num_tokens

    @precondition(lambda self: self.uncomputed())
    @rule(data=st.data(), limit=st.integers(1, 8))
    def compute(self, data, limit):
        request = data.draw(st.sampled_from(self.uncomputed()))
        self.compute_tokens(request, min(limit, request.num_uncomputed))

    @precondition(lambda self: self.on(Device.GPU))
    @rule(data=st.data())
    def grow(self, data):
        request = data.draw(st.sampled_from(self.on(Device.GPU)))
        if request.num_tokens == request.num_slots:
            count = data.draw(st.integers(0, 3))
            for seq in request.seqs:
                seq.append_tokens(data.draw(st.lists(TOKENS, min_size=count, max_size=count)))
        for seq in request.seqs:
            self.manager.drop_left_behind(seq)
        lookahead = data.draw(st.integers(0, 2 * self.block_size), label="lookahead")
        if self.manager.can_append_slots(request.group, lookahead):
            for seq in data.draw(st.permutations(request.seqs)):
                copies = self.manager.append_slots(seq, lookahead)
                self.copy(copies, Device.GPU, Device.GPU)
            request.num_slots = max(request.num_slots, self.step_end(request, request.num_written))
            self.access(request)
        elif self.manager.can_swap_out(request.group):
            self.swap_out_now(request)
        else:
            self.recompute_later(request)

    def access(self, request):
        self.now += 1
        for seq in request.seqs:
            self.manager.access_all_blocks_in_seq(seq, self.now)

    def recompute_later(self, request):
        for seq in request.seqs[1:]:
            self.manager.free(seq)
            seq.status = SequenceStatus.FINISHED
        self.manager.free(request.seqs[0])
        request.set_status(SequenceStatus.WAITING)
        self.live.remove(request)
        self.waiting.append(request)

    @precondition(lambda self: 0 < sum(len(request.seqs) for request in self.live) < MAX_SEQS)
    @rule(data=st.data())
    def fork(self, data):
        request = data.draw(st.sampled_from(self.live))
        parent = data.draw(st.sampled_from(request.seqs))
        child = parent.fork(self.new_id())
        free = self.num_free(request.device)
        self.manager.fork(parent, child)
        assert self.num_free(request.device) == free
        request.group.add(child)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def finish_one(self, data):
        request = data.draw(st.sampled_from(self.live))
        seq = data.draw(st.sampled_from(request.seqs))
        self.manager.free(seq)
        seq.status = SequenceStatus.FINISHED
        if not request.seqs:
            self.live.remove(request)
        self.manager.free(seq)

    def held_blocks(self, request):
        return {
            block
            for seq in request.seqs
            for block in self.manager.get_block_table(seq)[self.manager.get_first_block(seq) :]
        }

    def swap_out_now(self, request):
        held = self.held_blocks(request)
        copies = self.manager.swap_out(request.group)
        self.check_swap(request, copies, held, Device.CPU)

    def check_swap(self, request, copies, held, destination):
        moved = [source_id for source_id, _ in copies]
        assert len(set(moved)) == len(moved)
        assert set(moved) <= held
        assert len({destination_id for _, destination_id in copies}) == len(copies)
        if not self.is_caching:
            assert set(moved) == held
        self.copy(copies, request.device, destination)
        request.device = destination
        swapped_out = destination is Device.CPU
        request.set_status(SequenceStatus.SWAPPED if swapped_out else SequenceStatus.RUNNING)

    @precondition(lambda self: len(self.on(Device.GPU)) > len(self.on(Device.CPU)))
    @rule(data=st.data())
    def swap_out(self, data):
        request = data.draw(st.sampled_from(self.on(Device.GPU)))
        if self.manager.can_swap_out(request.group):
            self.swap_out_now(request)
        else:
            with pytest.raises(OutOfBlocksError):
                self.manager.swap_out(request.group)

    @precondition(lambda self: self.on(Device.CPU))
    @rule(data=st.data())
    def swap_in(self, data):
        request = data.draw(st.sampled_from(self.on(Device.CPU)))
        held = self.held_blocks(request)
        status = self.manager.can_swap_in(request.group)
        if len(held) > self.totals[Device.GPU]:
            assert status is AllocStatus.NEVER
        if status is AllocStatus.OK:
            copies = self.manager.swap_in(request.group)
            self.check_swap(request, copies, held, Device.GPU)
            assert self.manager.can_append_slots(request.group)
        elif not any(other.device is Device.GPU for other in self.live):
            # Nothing else runs, so waiting would be for ever.
            assert status is AllocStatus.NEVER

    @invariant()
    def nothing_leaks(self):
        used = {Device.GPU: set(), Device.CPU: set()}
        for request in self.live:
            used[request.device] |= self.held_blocks(request)
        for device, total in self.totals.items():
            assert used[device] <= set(range(total))
            assert self.num_free(device) + len(used[device]) == total

    @invariant()
    def every_sequence_reads_its_own_tokens(self):
        for request in self.live:
            memory = self.memory[request.device]
            oldest = self.oldest_needed(request)
            for seq in request.seqs:
                table = self.manager.get_block_table(seq)
                assert len(table) * self.block_size >= request.num_slots
                for position in range(oldest, request.num_written):
                    block = memory[table[position // self.block_size]]
                    assert block[position % self.block_size] == kv(seq, position)

    @invariant()
    def slots_yet_to_be_written_have_one_content(self):
        """Sequences share a block only while the tokens they keep or will write there agree."""
        contents = {}
        for request in self.live:
            oldest = self.oldest_needed(request)
            for seq in request.seqs:
                table = self.manager.get_block_table(seq)
                for position in range(oldest, request.num_slots):
                    block_id, offset = divmod(position, self.block_size)
                    slot = (request.device, table[block_id], offset)
                    assert contents.setdefault(slot, kv(seq, position)) == kv(seq, position)


BlockManagerMachine.TestCase.settings = settings(max_examples=280, stateful_step_count=40)
TestBlockManager = BlockManagerMachine.TestCase
