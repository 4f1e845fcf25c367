"""The loop, one pass at a time, with a UCX and copies that end when a test says so: order, windows, turns, failures."""

import ctypes
import os
from ctypes import c_int64, c_uint32

import pytest

from kvconnector_kernels.pump import records as r
from kvconnector_kernels.pump.loop_calls import look

JOB_BYTES, CHUNK_BYTES = 64, 40
OK, IN_PROGRESS, TRUNCATED, CANCELED, LOST = 0, 1, -9, -16, -25
FIRST_REQUEST = 1 << 20
LIMIT_NS = 20_000_000
TAGS = 1000
"""Tags between two programs."""


class Loop:
    """The records of a loop. `sent` and `received` are the tags of what was posted, in order, with the request of each,
    `copied` the slots' addresses, `calls` the direct reads that were called, `num_sleeps` how often the loop has slept.
    With `at_once` sends end when they are posted, and with `copies` copies do. Each look at the clock takes `tick_ns`.
    """

    def __init__(self, *, num_slots, num_programs=1, at_once=False, copies=True):
        self.at_once, self.copies = at_once, copies
        self.sent, self.received, self.copied, self.cancelled = {}, {}, [], []
        self.freed, self.statuses, self.lengths, self.has_message = [], {}, {}, False
        self.calls, self.returned = [], r.MORE
        self.tick_ns = self.now_ns = self.num_sleeps = 0
        self.fences = (c_uint32 * (3 * num_slots))()
        self.sends = (r.SendRecord * num_programs)()
        self.receives = (r.ReceiveRecord * num_programs)()
        self.reads = (r.ReadRecord * num_programs)()
        self.send_slots, self.recv_slots = (
            (r.SlotRecord * num_slots)(
                *(
                    r.SlotRecord(
                        program=-1, address=1 + side + slot, fence=self._fence(side + slot)
                    )
                    for slot in range(num_slots)
                )
            )
            for side in (0, num_slots)
        )
        self._lock, self._info, self._jobs = r.aligned_lock(), r.TagInfo(), []
        self._wake = (ctypes.c_int32 * 2)(-1, 0)
        self._runs = (r.Run * 3)(*[r.Run(owner=r.INLINE)] * 3)
        self._called = []
        self.state = r.State(
            num_sends=num_programs,
            num_receives=num_programs,
            num_reads=num_programs,
            num_send_slots=num_slots,
            num_recv_slots=num_slots,
            job_bytes=JOB_BYTES,
            copy=self._as_c(5, self._copy),
            worker_progress=self._as_c(1, lambda worker: 0),
            worker_arm=self._as_c(1, self._arm),
            tag_send=self._as_c(5, self._send),
            tag_recv=self._as_c(6, self._receive),
            tag_probe=self._as_c(5, lambda *_: self.has_message),
            request_status=self._as_c(1, self._status),
            request_free=self._as_c(1, self.freed.append),
            request_cancel=self._as_c(2, lambda worker, request: self.cancelled.append(request)),
            recv_test=self._as_c(2, self._test),
            clock_gettime=self._as_c(2, self._read_clock),
            wake_fd=ctypes.addressof(self._wake),
            **{
                name: ctypes.addressof(getattr(self, name))
                for name in ("sends", "receives", "reads", "send_slots", "recv_slots")
            },
            runs=ctypes.addressof(self._runs),
            lock=ctypes.addressof(self._lock),
            recv_info=ctypes.addressof(self._info),
        )

    def _fence(self, index):
        return ctypes.addressof(self.fences) + 4 * index

    def _as_c(self, count, function):
        def call(*arguments):
            return int(function(*arguments) or 0)

        self._called.append(ctypes.CFUNCTYPE(c_int64, *[c_int64] * count)(call))
        return ctypes.cast(self._called[-1], ctypes.c_void_p).value

    def _arm(self, worker):
        self.num_sleeps += 1

    def _read_clock(self, kind, timespec):
        self.now_ns += self.tick_ns
        words = (c_int64 * 2).from_address(timespec)
        words[0], words[1] = divmod(self.now_ns, 1_000_000_000)

    def _copy(self, context, job, slot, fence, value):
        self.copied.append(slot)
        if self.copies:
            c_uint32.from_address(fence).value = value

    def _send(self, endpoint, buffer, count, tag, param):
        self.sent[tag] = 0 if self.at_once else FIRST_REQUEST + tag
        return self.sent[tag]

    def _receive(self, worker, buffer, count, tag, *_):
        self.received[tag] = FIRST_REQUEST + tag
        return self.received[tag]

    def _status(self, request):
        return self.statuses.get(request, IN_PROGRESS)

    def _test(self, request, info):
        self._info.length = self.lengths.get(request, CHUNK_BYTES)
        return self._status(request)

    def _program(self, records, number, num_chunks, **fields):
        jobs = (c_int64 * (num_chunks * JOB_BYTES // 8))()
        jobs[:: JOB_BYTES // 8] = [CHUNK_BYTES] * num_chunks
        self._jobs.append(jobs)
        records[number] = type(records[number])(
            phase=r.RUNNING,
            jobs=ctypes.addressof(jobs),
            first_tag=number * TAGS,
            num_chunks=num_chunks,
            **fields,
        )
        self.state.num_inline += 1
        return records[number]

    def send(self, number=0, *, num_chunks=4, window=2):
        return self._program(self.sends, number, num_chunks, window=window)

    def receive(self, number=0, *, num_chunks=4, window=2):
        return self._program(self.receives, number, num_chunks, window=window, limit=num_chunks)

    def read(self, number=0, *, returned=r.MORE):
        """Begin a direct read, whose function returns this. Returns its record."""
        self.returned = returned
        function = self._as_c(4, lambda *_: self.calls.append(number) or self.returned)
        fence = self._fence(2 * len(self.send_slots) + number)
        self.reads[number] = r.ReadRecord(phase=r.RUNNING, function=function, fence=fence)
        return self.reads[number]

    def passes(self, count=8):
        """Make some passes. Returns why the last one ended."""
        for _ in range(count):
            why = look(ctypes.addressof(self.state))
        return why

    def run(self, owner, limit_ns, *, begin=None):
        """Run for this long, after a call of `begin`. Returns the time that has passed."""
        self.tick_ns, self._lock.owner = limit_ns // 100, owner
        self._runs[owner] = r.Run(owner=owner, limit_ns=limit_ns)
        self.state.entering = owner
        self.state.begin = None if begin is None else self._as_c(1, lambda _: begin())
        before_ns = self.now_ns
        assert look(ctypes.addressof(self.state)) == r.TIMEOUT
        return self.now_ns - before_ns

    def end(self, request, status=OK, length=CHUNK_BYTES):
        """End what was posted."""
        self.statuses[request], self.lengths[request] = status, length

    def end_copy(self, slot):
        self.fences[slot.address - 1] = slot.fence_value


def states(slots):
    return [slot.state for slot in slots]


def test_chunks_are_sent_in_their_order_whichever_is_packed_first():
    loop = Loop(num_slots=3, copies=False)
    loop.send(num_chunks=3, window=3)
    loop.passes()
    assert len(loop.copied) == 3
    for slot in reversed(loop.send_slots):
        loop.end_copy(slot)
        loop.passes()
    assert list(loop.sent) == [0, 1, 2]


def test_a_send_has_no_more_chunks_under_way_than_its_window():
    loop = Loop(num_slots=4)
    send = loop.send(num_chunks=4, window=2)
    loop.passes()
    assert list(loop.sent) == [0, 1]
    loop.end(loop.sent[0])
    loop.passes()
    assert list(loop.sent) == [0, 1, 2]
    assert send.num_in_flight == 2


def test_sends_take_turns_for_one_slot():
    loop = Loop(num_slots=1, num_programs=2, at_once=True)
    for number in range(2):
        loop.send(number, num_chunks=3, window=1)
    loop.passes()
    assert list(loop.sent) == [0, TAGS, 1, TAGS + 1, 2, TAGS + 2]


def test_a_send_is_over_once_ucx_has_sent_all_of_it():
    loop = Loop(num_slots=2)
    send = loop.send(num_chunks=2)
    loop.passes()
    loop.end(loop.sent[1])
    loop.passes()
    assert send.phase == r.RUNNING
    loop.end(loop.sent[0])
    assert loop.passes(1) == r.NOTICE
    assert send.phase == r.OVER
    assert states(loop.send_slots) == [r.FREE, r.FREE]
    assert sorted(loop.freed) == sorted(loop.sent.values())


def test_a_stopped_send_ends_once_its_blocks_are_read_no_more():
    loop = Loop(num_slots=2, copies=False)
    send = loop.send()
    loop.passes()
    send.stopped = 1
    loop.passes()
    assert send.phase == r.RUNNING
    for slot in loop.send_slots:
        loop.end_copy(slot)
    loop.passes()
    assert send.phase == r.OVER
    assert not loop.sent
    assert states(loop.send_slots) == [r.FREE, r.FREE]


def test_what_an_ended_send_has_under_way_does_not_count_for_the_next_one_in_its_row():
    loop = Loop(num_slots=4)
    send = loop.send(window=2)
    loop.passes()
    send.stopped = 1
    loop.passes()
    assert send.phase == r.OVER
    assert sorted(states(loop.send_slots)) == [r.FREE, r.FREE, r.POSTED, r.POSTED]
    former = list(loop.sent.values())
    following = loop.send(num_chunks=0)
    for request, status in zip(former, (OK, LOST), strict=True):
        loop.end(request, status)
    loop.passes()
    assert (following.num_in_flight, following.error_kind) == (0, r.NO_ERROR)


def test_the_slot_of_a_message_that_failed_is_left_to_the_caller_and_the_first_error_is_kept():
    """UCX may still read it."""
    loop = Loop(num_slots=2)
    send = loop.send()
    loop.passes()
    for chunk, status in enumerate((LOST, CANCELED)):
        loop.end(loop.sent[chunk], status)
    loop.passes()
    assert (send.error_kind, send.error_value, send.error_chunk) == (r.UCX_ERROR, LOST, 0)
    assert states(loop.send_slots) == [r.FAILED, r.FAILED]
    assert list(loop.sent) == [0, 1]
    assert send.phase == r.OVER


@pytest.mark.parametrize("length", [CHUNK_BYTES - 1, CHUNK_BYTES + 1])
def test_a_message_of_another_length_fails_its_receive_and_is_not_unpacked(length):
    loop = Loop(num_slots=2)
    receive = loop.receive()
    loop.passes()
    loop.end(loop.received[0], length=length)
    loop.passes()
    assert (receive.error_kind, receive.error_value) == (r.SIZE_ERROR, length)
    assert not loop.copied


def test_a_stopped_receive_takes_what_its_peer_sends_and_unpacks_nothing():
    loop = Loop(num_slots=2)
    receive = loop.receive(num_chunks=4)
    loop.passes()
    receive.stopped = 1
    loop.passes()
    assert receive.phase == r.QUIET  # nothing writes to the blocks any more
    receive.limit = 3  # the peer has sent as many
    for chunk in range(3):
        loop.end(loop.received[chunk])
        loop.passes()
    assert list(loop.received) == [0, 1, 2]
    assert not loop.copied
    assert receive.phase == r.OVER
    assert states(loop.recv_slots) == [r.FREE, r.FREE]


def test_a_receive_that_is_stopped_while_it_unpacks_is_quiet_after_that():
    loop = Loop(num_slots=1, copies=False)
    receive = loop.receive(window=1)
    loop.passes()
    loop.end(loop.received[0])
    loop.passes()
    receive.stopped = 1
    loop.passes()
    assert (receive.phase, receive.num_copying) == (r.RUNNING, 1)
    loop.end_copy(loop.recv_slots[0])
    loop.passes()
    assert receive.phase == r.QUIET


@pytest.mark.parametrize("status", [TRUNCATED, CANCELED, LOST])
def test_after_a_lost_endpoint_a_receive_takes_nothing_more_and_others_go_on(status):
    """libucp may crash on what came before the loss."""
    loop = Loop(num_slots=4, num_programs=2)
    failed, other = (loop.receive(number, num_chunks=4) for number in range(2))
    loop.passes()
    loop.end(loop.received[0], status)
    loop.passes()
    assert (failed.error_kind, failed.error_value) == (r.UCX_ERROR, status)
    assert failed.stopped
    assert loop.cancelled == ([loop.received[1]] if status == LOST else [])
    assert failed.limit == (2 if status == LOST else 4)
    assert (other.limit, other.error_kind) == (4, r.NO_ERROR)
    assert (2 in loop.received) == (status != LOST)


def test_the_caller_gets_a_slot_that_it_waits_for():
    loop = Loop(num_slots=1)
    loop.receive(num_chunks=1, window=1)
    loop.state.wants_slots = 1
    assert loop.passes() == r.TIMEOUT
    loop.end(loop.received[0])
    assert [loop.passes(1) for _ in range(3)][-1] == r.NOTICE
    loop.state.wants_slots = 0
    assert loop.passes(1) == r.TIMEOUT


def test_a_control_message_ends_a_run_and_stays_where_it_is():
    loop = Loop(num_slots=1)
    assert loop.passes(1) == r.TIMEOUT
    loop.has_message = True
    assert loop.passes(1) == r.READABLE


def test_direct_reads_take_turns_call_by_call():
    loop = Loop(num_slots=1, num_programs=2)
    for number in range(2):
        loop.read(number)
    loop.passes(6)
    assert loop.calls in ([0, 1] * 3, [1, 0] * 3)


def test_a_direct_read_is_over_once_its_fence_says_so():
    loop = Loop(num_slots=1)
    read = loop.read(returned=r.ALL)
    loop.passes()
    assert (loop.calls, read.phase) == ([0], r.RUNNING)
    c_uint32.from_address(read.fence).value = read.fence_value
    assert loop.passes(1) == r.NOTICE
    assert (read.phase, read.error_kind) == (r.OVER, r.NO_ERROR)


def test_a_direct_read_that_fails_says_why_after_its_last_copy():
    loop = Loop(num_slots=1)
    read = loop.read(returned=7)
    loop.passes()
    assert (read.phase, read.error_kind, read.error_value) == (r.RUNNING, r.READ_ERROR, 7)
    c_uint32.from_address(read.fence).value = read.fence_value
    loop.passes()
    assert (loop.calls, read.phase) == ([0], r.OVER)


@pytest.mark.parametrize("what", ["nothing", "a send", "a receive", "a direct read"])
def test_the_loop_sleeps_unless_a_copy_is_under_way(what):
    """No descriptor shows that a copy has ended."""
    loop = Loop(num_slots=1, copies=False)
    if what == "a send":
        loop.send(window=1)
    elif what == "a receive":
        loop.receive(window=1)
        loop.passes()
        loop.end(loop.received[0])
    elif what == "a direct read":
        loop.read(returned=r.ALL)
    loop.passes()
    loop.run(r.INLINE, LIMIT_NS)
    assert (loop.num_sleeps > 0) == (what == "nothing")


@pytest.mark.parametrize("owner", [r.DRIVER, r.INLINE])
def test_the_driver_returns_when_it_is_asked_to_and_inline_progress_when_its_time_is_over(owner):
    loop = Loop(num_slots=1, copies=False)
    loop.send(window=1)  # whose copy does not end

    def ask():
        loop.state.return_by_ns = loop.now_ns + LIMIT_NS // 4

    passed_ns = loop.run(owner, LIMIT_NS, begin=ask)
    assert passed_ns >= LIMIT_NS // 4
    assert (passed_ns < LIMIT_NS) == (owner == r.DRIVER)


def test_the_driver_has_released_the_lock_before_it_sleeps_for_others():
    loop = Loop(num_slots=1)
    owners = []
    loop.state.yield_gil_us = 1 << 40
    loop.state.usleep = loop._as_c(1, lambda _: owners.append(loop._lock.owner))
    loop.run(r.DRIVER, LIMIT_NS)
    assert owners == [r.NOBODY]
    assert loop._lock.owner == r.NOBODY


def test_what_the_driver_has_found_may_be_taken_by_another_thread():
    """It waits for the GIL, which that thread has."""
    loop = Loop(num_slots=1)
    loop._lock.owner = r.DRIVER
    loop._runs[r.DRIVER] = r.Run(owner=r.DRIVER, limit_ns=LIMIT_NS)
    loop.state.entering = r.DRIVER
    loop.has_message = True
    assert loop.passes(1) == r.READABLE
    assert loop._lock.pending == 1
    loop.state.entering, loop._lock.pending = r.NOBODY, 0
    assert loop.passes(1) == r.READABLE
    assert loop._lock.pending == 0  # who looks inline does it


def test_work_that_is_added_during_a_run_begins_in_its_next_pass():
    loop = Loop(num_slots=1)
    added = []

    def add():
        if not added:
            added.append(loop.receive(window=1))

    loop.state.worker_progress = loop._as_c(1, lambda worker: add())
    loop.state.spin_after_work_ns = 1 << 60
    loop.run(r.INLINE, LIMIT_NS)
    assert list(loop.received) == [0]


def test_the_driver_consumes_what_has_woken_it():
    """Otherwise it would never sleep again."""
    loop, fd = Loop(num_slots=1), os.eventfd(1, os.EFD_NONBLOCK)
    try:
        loop._wake[0] = fd
        loop.run(r.DRIVER, LIMIT_NS)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)
    finally:
        os.close(fd)
