"""The lease board, read as by a peer: raw bytes at any moment."""

import ctypes

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvconnector.datapath.direct.board import LeaseBoard, is_valid
from kvconnector.layout import Watermark
from kvconnector.wire.export import BUCKET_BYTES
from kvconnector_kernels.pump.board_entries import ENTRIES_PER_BUCKET, ENTRY_BYTES

NUM_TOKENS = 40
AHEAD = st.tuples(
    st.integers(0, 2 * NUM_TOKENS) | st.just((1 << 21) - 1),
    st.integers(0, 12) | st.just((1 << 10) - 1),
)


def key_of(number, bucket=0, num_buckets=2):
    """Return different keys of one bucket."""
    return (number * num_buckets + bucket).to_bytes(8, "little") + b"\x01" * 8


def is_found(board, key, *stops):
    return is_valid(board.address, board.num_buckets, key, *stops)


class SlowWriter:
    """Writes in order when the test lets it, like a stream after long kernels."""

    def __init__(self, address, nbytes):
        self.range = range(address, address + nbytes)
        self.pending = []

    def write(self, address, value):
        assert address in self.range
        assert address % 4 == 0
        self.pending.append((address, value))

    def execute_one(self):
        address, value = self.pending.pop(0)
        ctypes.c_int32.from_address(address).value = value

    def close(self):
        while self.pending:
            self.execute_one()


def test_a_bucket_has_the_size_that_the_wire_states():
    assert ENTRIES_PER_BUCKET * ENTRY_BYTES == BUCKET_BYTES


def test_a_full_bucket_refuses_one_lease_and_takes_it_once_there_is_room():
    board = LeaseBoard(num_buckets=2)
    keys = [key_of(n) for n in range(ENTRIES_PER_BUCKET + 1)]
    assert all(board.publish(key, Watermark(1)) for key in keys[:-1])
    assert not board.publish(keys[-1], Watermark(1))
    assert not is_found(board, keys[-1], 1)
    assert repr(board) == f"<LeaseBoard of 2 buckets, {ENTRIES_PER_BUCKET} leases>"
    assert board.publish(key_of(0, bucket=1), Watermark(1))
    board.retract(keys[3])
    assert board.publish(keys[-1], Watermark(1))
    assert all(is_found(board, key, 1) == (key != keys[3]) for key in keys)


class Boards(RuleBasedStateMachine):
    """A board, compared with the leases that are published, and those of them that are written."""

    def __init__(self):
        super().__init__()
        self.board = LeaseBoard(self._open, num_buckets=2)
        self.unused = iter(range(1, 10_000))
        self.published = {}
        self.retracted = []
        self.writes = []
        self.written = {}

    def _open(self, *place):
        self.writer = SlowWriter(*place)
        return self.writer

    @rule(bucket=st.integers(0, 1), num_tokens=st.integers(0, NUM_TOKENS), ahead=AHEAD)
    def publish(self, bucket, num_tokens, ahead):
        key = key_of(next(self.unused), bucket)
        if self.board.publish(key, Watermark(num_tokens, *ahead)):
            self._expect(key, num_tokens, ahead)
            self.writes.append((key, "ready", True))

    @precondition(lambda self: self.published)
    @rule(pick=st.integers(0, 99), added=st.integers(0, NUM_TOKENS), ahead=AHEAD)
    def grow(self, pick, added, ahead):
        key = list(self.published)[pick % len(self.published)]
        num_tokens = self.published[key] + added
        assert self.board.publish(key, Watermark(num_tokens, *ahead))
        self._expect(key, num_tokens, ahead)

    def _expect(self, key, num_tokens, ahead):
        self.published[key] = num_tokens
        self.writes += [(key, "num_tokens", num_tokens), (key, "ahead", ahead)]

    @precondition(lambda self: self.published)
    @rule(pick=st.integers(0, 99))
    def retract(self, pick):
        key = list(self.published)[pick % len(self.published)]
        del self.published[key]
        self.board.retract(key)
        self.retracted.append(key)

    @precondition(lambda self: self.writes)
    @rule()
    def a_write_executes(self):
        self.writer.execute_one()
        key, field, value = self.writes.pop(0)
        self.written.setdefault(key, {})[field] = value

    @invariant()
    def exactly_what_is_published_and_ready_is_found(self):
        for key in self.published:
            written = self.written.get(key, {})
            is_ready = "ready" in written
            stop, (ahead, layers) = written.get("num_tokens", 0), written.get("ahead", (0, 0))
            assert is_found(self.board, key, stop) == is_ready
            assert not is_found(self.board, key, stop + 1)
            is_more = is_ready and ahead > stop and layers > 0
            assert is_found(self.board, key, stop + 1, max(layers, 1)) == is_more
            assert not is_found(self.board, key, stop + 1, layers + 1)
            assert not is_found(self.board, key, max(stop, ahead) + 1, 1)
        assert not any(is_found(self.board, key, 0, 0) for key in self.retracted)


TestBoards = Boards.TestCase
