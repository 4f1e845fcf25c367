"""A model of the block manager in dicts: the memory that its copies write, and a prefix cache.

The modelled KV of a token is its request's extra keys and all tokens up to it, so what a sequence reads through its
block table shows whether the blocks are its own. A block can be reused if it was computed and holds all its tokens.
"""

from hypothesis import strategies as st

from kvconnector.cache.block_manager import BlockSpaceManager, Device

GPU, CPU = Device.GPU, Device.CPU
STALE = "stale"


class Request:
    """A group whose sequences have equal lengths and progress; `tokens` has each sequence's tokens. The KV of the first
    `num_written` is in the blocks: accepted drafts are written before they have slots of their own. If it
    `is_outdated`, the cache was reset since it was admitted.
    """

    def __init__(self, group, tokens, extra_keys=(), num_encoder_tokens=0):
        self.group = group
        self.tokens = {seq: list(tokens) for seq in group.seqs()}
        self.extra_keys = extra_keys
        self.encoder = range(num_encoder_tokens)
        self.device = GPU
        self.num_computed = 0
        self.num_written = 0
        self.is_outdated = False
        self.num_slots = 0

    @property
    def num_tokens(self):
        return len(next(iter(self.tokens.values())))

    def kv(self, seq, position):
        return self.extra_keys, tuple(self.tokens[seq][: position + 1])

    def set_status(self, status):
        for seq in self.tokens:
            seq.status = status


class BlockModel:
    """A block manager, the memory of its blocks, its cached blocks, and the requests that hold blocks."""

    is_caching = has_window = has_chunks = is_recurrent = is_ring = False
    row_tokens = 1

    def set_up(self, data, watermark, window):
        self.block_size = self.row_tokens * data.draw(st.integers(1, 4), label="block_size")
        self.totals = {GPU: data.draw(st.integers(3, 14)), CPU: data.draw(st.integers(0, 10))}
        self.step_tokens = data.draw(st.integers(1, 6), label="step_tokens")
        self.manager = BlockSpaceManager(
            self.block_size,
            *self.totals.values(),
            watermark,
            sliding_window=window if self.has_window else None,
            attention_chunk_size=window if self.has_chunks else None,
            is_recurrent=self.is_recurrent,
            row_tokens=self.row_tokens,
            is_ring=self.is_ring,
            max_step_tokens=self.step_tokens,
            enable_caching=self.is_caching,
        )
        # a state is needed like a window of two tokens
        self.extent = 2 if self.is_recurrent else window
        self.forgets = self.has_window or self.has_chunks or self.is_recurrent
        self.watermark_blocks = int(watermark * self.totals[GPU])
        slots = 1 if self.is_recurrent else self.block_size
        blocks = [(device, block) for device in self.totals for block in range(self.totals[device])]
        self.memory = {block: [STALE] * slots for block in blocks}
        self.cache = {GPU: {}, CPU: {}}  # block ids by the KV of their last token
        self.live = []

    def num_free(self, device):
        numbers = (self.manager.get_num_free_gpu_blocks(), self.manager.get_num_free_cpu_blocks())
        return numbers[device is CPU]

    def on(self, device):
        return [request for request in self.live if request.device is device]

    def num_blocks(self, num_tokens):
        if self.is_ring:
            return min(1, num_tokens)
        return -(-(num_tokens - num_tokens % self.row_tokens) // self.block_size)

    def block(self, position):
        """Return the index of a position's block."""
        return 0 if self.is_ring else position // self.block_size

    def in_memory(self, positions):
        """Return those of a sequence's positions whose slots are theirs: the last of a row, or the newest of a ring."""
        if self.is_ring:
            positions = [*positions][-self.block_size :]
        return [each for each in positions if (each + 1) % self.row_tokens == 0]

    def oldest(self, num_computed):
        """Return the oldest token that the token after `num_computed` others sees."""
        if self.has_chunks:
            return num_computed // self.extent * self.extent
        return max(0, num_computed - self.extent + 1) if self.forgets else 0

    def step_end(self, request, num_computed):
        step = self.step_tokens if self.forgets else request.num_tokens
        return min(request.num_tokens, num_computed + step)

    def owners(self, device):
        """Return the number of tables that hold each block."""
        owners = {}
        for request in self.on(device):
            for seq in request.tokens:
                first = self.manager.get_first_block(seq)
                for block in self.manager.get_block_table(seq)[first:]:
                    owners[block] = owners.get(block, 0) + 1
            for block in self.cross_table(request):
                assert owners.setdefault(block, 1) == 1
        return owners

    def cross_table(self, request):
        return self.manager.get_cross_block_table(request.group) if request.encoder else []

    def slot(self, request, table, position):
        index = 0 if self.is_recurrent else position % self.block_size
        return self.memory[request.device, table[self.block(position)]], index

    def write(self, request, table, position, value):
        block, index = self.slot(request, table, position)
        block[index] = value

    def read(self, request, table, position):
        block, index = self.slot(request, table, position)
        return block[index]

    def copy(self, copies, source, destination):
        for source_id, destination_id in copies:
            self.hand_out(destination, [destination_id])
            self.memory[destination, destination_id][:] = self.memory[source, source_id]

    def hand_out(self, device, blocks):
        """Give these blocks new owners: their old content is neither cached nor readable."""
        cache = self.cache[device]
        self.cache[device] = {kv: block for kv, block in cache.items() if block not in blocks}
        for block in blocks:
            self.memory[device, block][:] = [STALE] * len(self.memory[device, block])

    def is_whole(self, request, seq, block, index):
        """Returns True if a block holds all tokens of a sequence's block `index`, or the state after the last."""
        tokens = range(index * self.block_size, (index + 1) * self.block_size)
        kept = tokens[-1:] if self.is_recurrent else self.in_memory(tokens)
        memory = self.memory[request.device, block]
        held = memory if self.is_recurrent else [memory[each % self.block_size] for each in kept]
        return held == [request.kv(seq, token) for token in kept]

    def hit(self, request, seq, index):
        return self.cache[GPU].get(request.kv(seq, (index + 1) * self.block_size - 1))

    def expected_hit(self, request):
        """Return the most leading tokens, in whole blocks and without the last, whose visible blocks are all cached."""
        (seq, *_), size = request.tokens, self.block_size
        for num_blocks in range((request.num_tokens - 1) // size, 0, -1):
            # a query that sees no earlier token needs no block, but a hit needs the last block
            oldest = min(self.oldest(num_blocks * size) // size, num_blocks - 1)
            needed = range(oldest, num_blocks)
            if all(self.hit(request, seq, index) is not None for index in needed):
                return num_blocks * size
        return 0

    def compute_tokens(self, request, num_tokens, written=None):
        """Compute up to `num_tokens` tokens; with `written`, load these positions instead."""
        start = request.num_computed
        stop = min(start + num_tokens, request.num_slots)
        tables = {seq: self.manager.get_block_table(seq) for seq in request.tokens}
        for seq, table in tables.items():
            unwritten = range(max(start, request.num_written), stop)
            for position in self.in_memory(unwritten if written is None else written):
                self.write(request, table, position, request.kv(seq, position))
        self.manager.mark_blocks_as_computed(request.group, stop - start)
        request.num_computed = stop
        request.num_written = max(request.num_written, stop)
        for seq, table in tables.items():
            for index in range(start // self.block_size, stop // self.block_size):
                is_held = index >= self.manager.get_first_block(seq)
                can_share = self.is_caching and is_held and not request.is_outdated
                if can_share and self.is_whole(request, seq, table[index], index):
                    kv = request.kv(seq, (index + 1) * self.block_size - 1)
                    self.cache[GPU].setdefault(kv, table[index])

    def expected_append(self, request, seq, lookahead):
        """Return indices of new blocks for a sequence's next slots, each with True if it copies a shared block. A block
        after the last token may have drafts, accepted or not, so it is copied like any other.
        """
        table, owners = self.manager.get_block_table(seq), self.owners(GPU)
        end = max(request.num_slots, self.step_end(request, request.num_computed)) + lookahead
        touched = range(self.block(request.num_slots), self.num_blocks(end))
        if end == request.num_slots:
            touched = range(0)
        return {
            index: is_shared
            for index in touched
            if (is_shared := index < len(table) and owners[table[index]] > 1) or index >= len(table)
        }
