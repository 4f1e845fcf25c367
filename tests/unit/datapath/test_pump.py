"""The pumped data path over real UCX: bytes, slots, stops, failures, and how often it returns to Python."""

import ctypes
import os
import sys
import threading
import time
from functools import reduce
from operator import and_, or_

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.datapath.pump import copies_cpu, pacing
from kvconnector.datapath.pump.receives import new_tags
from kvconnector.errors import PeerLostError
from kvconnector.planning import MAX_CHUNKS
from kvconnector.session import events as ev
from kvconnector.transport import MessageSizeError, RegistrationError
from kvconnector.transport.ucx import abi
from tests.support.examples import examples
from tests.support.fakes import AheadClock
from tests.support.waiting import DEADLINE_S, until
from tests.unit.datapath.caches import BLOCKS, ORDERS, unlike_sides
from tests.unit.datapath.direct_pair import only_consumer_steps
from tests.unit.datapath.pump_pair import (
    QUARANTINE_S,
    READS,
    Pair,
    Side,
    both_programs,
    receive_of,
    slots_are_free,
)

pytestmark = pytest.mark.ucx
LONG_S = 1e9
LONG_CLOCK_S = 1 << 20
SMALL = {"chunk_tokens": 1, "chunk_rows": 1}


@examples(20)
@given(data=st.data())
def test_any_geometry_arrives_byte_for_byte(data):
    p_shape, d_shape, tokens, window = data.draw(unlike_sides())
    cut = {
        "order": data.draw(st.sampled_from(ORDERS)),
        "chunk_tokens": data.draw(st.integers(1, 20)),
        "chunk_rows": data.draw(st.integers(1, 4)),
        "heads": window,
    }
    source = data.draw(st.permutations(range(BLOCKS)))
    destination = data.draw(st.permutations(range(BLOCKS)))
    slot_bytes = 4 * 20 * p_shape.heads * p_shape.dim * p_shape.item
    is_checked = data.draw(st.booleans())
    p, d = (
        Side(
            shape,
            is_checked=is_checked,
            slot_bytes=slot_bytes,
            num_slots=data.draw(st.integers(1, 3)),
            seed=seed,
            min_streamed_bytes=data.draw(st.sampled_from([0, 1 << 20])),
        )
        for shape, seed in ((p_shape, 3), (d_shape, None))
    )
    pair = Pair(p, d)
    try:
        receive = d.program(list(destination), tokens, **cut)
        pair.serve(pair.ask(1, receive), p.program(list(source), tokens, **cut))
        pair.until(lambda: bool(pair.find(ev.ReceiveFinished) and pair.find(ev.SendOver)))
        pair.check_arrived(list(source), list(destination), tokens, window)
        assert slots_are_free(pair)
    finally:
        pair.close()


def test_more_sends_at_once_than_there_are_rows_for_at_first(make_pair):
    pair, tokens = make_pair(num_slots=20), range(1, 21)
    rows = pair.p.path.sends.rows
    programs = {
        read: both_programs(pair, range(read, read + 1), chunk_tokens=1, chunk_rows=8)[2:]
        for read in tokens
    }
    for posted in [pair.ask(read, receive) for read, (_, receive) in programs.items()]:
        pair.serve(posted, programs[posted.read.read_id][0])
    assert len(pair.p.path.sends.rows) > len(rows)
    pair.until(lambda: all(pair.find(ev.ReceiveFinished, read) for read in tokens))
    source, destination, _, _ = both_programs(pair, tokens, chunk_tokens=1, chunk_rows=8)
    np.testing.assert_array_equal(pair.d.dense(destination, tokens), pair.p.dense(source, tokens))


def test_a_data_path_names_its_reads_and_slots(make_pair):
    pair = make_pair(num_slots=3)
    _, _, _, receive = both_programs(pair, range(48), **SMALL)
    for read in (1, 2):
        pair.d.path.receives.submit(receive_of(read, receive))
    pair.until(
        lambda: (
            not any(side.path.lock.is_greeting for side in (pair.p, pair.d))
            and pair.d.path.receives.slots.num_busy == 3
        )
    )
    no_reads = "<DirectReads of 0 peers, active [], waiting []>"
    free = "<Slots 3 of 3 free, 0 busy>"
    assert repr(pair.p.path) == (
        f"<DataPath open, <Sends active [], {free}>,"
        f" <Receives active [], waiting for slots [], {free}>, {no_reads}>"
    )
    assert repr(pair.d.path) == (
        f"<DataPath open, <Sends active [], {free}>,"
        f" <Receives active [1], waiting for slots [2], <Slots 0 of 3 free, 3 busy>>, {no_reads}>"
    )
    pair.d.path.close()
    assert "DataPath closed" in repr(pair.d.path)


def test_the_first_chunk_is_sent_at_once(make_pair):
    pair = make_pair()
    _, _, send, receive = both_programs(pair, range(48), **SMALL)
    pair.serve(pair.ask(1, receive), send)
    # the producer's thread is still busy with other things
    only_consumer_steps(pair, 1, ev.ReceiveAdvanced)


def test_reads_are_expected_only_once_some_were_packed(make_pair, monkeypatch):
    pair = make_pair()
    _, _, send, receive = both_programs(pair, range(48), **SMALL)
    expected = []
    monkeypatch.setattr(pair.p.path.copies, "expect", expected.append)
    pair.p.path.sends.expect(send.blocks)
    assert not expected
    pair.serve(pair.ask(1, receive), send)
    pair.p.path.sends.expect(send.blocks)
    assert [blocks is send.blocks for blocks in expected] == [True]


def test_a_cancelled_receive_that_does_not_end_loses_its_slot_and_its_memory(
    make_pair, monkeypatch
):
    clock = AheadClock(0.0)
    pair = make_pair(num_slots=2, clock=clock)
    source, destination, send, receive = both_programs(pair, range(48), **SMALL)
    pair.ask(1, receive)
    pair.step()  # posts what was promised
    slots, libucp = pair.d.path.receives.slots, pair.d.transport.libucp
    addresses = set(slots.rows["address"].tolist())
    cancel = libucp.request_cancel
    held = []
    monkeypatch.setattr(libucp, "request_cancel", held.append)
    pair.stop(1)
    pair.d.path.receives.drain(READS[1], None)
    pair.until(lambda: pair.find(ev.ReceiveStopped, 1))
    clock.now_s = QUARANTINE_S / 2
    for _ in range(20):
        pair.step()
    assert pair.find(ev.ReceiveDrained, 1) is None
    clock.now_s = QUARANTINE_S + 1
    pair.until(lambda: pair.find(ev.ReceiveDrained, 1))
    # other reads receive into other memory, whatever UCX does with the memory that it still holds
    assert addresses.isdisjoint(slots.rows["address"].tolist())
    pair.serve(pair.ask(2, receive), send)
    pair.until(lambda: pair.find(ev.ReceiveFinished, 2))
    pair.check_arrived(source, destination, range(48), range(pair.p.shape.heads))
    assert len(held) == 2
    for request in held:
        cancel(request)

    def memory_is_back():
        clock.advance(1.0)
        pair.d.path.step()
        return {address for _, address in slots._spare} == addresses

    pair.until(memory_is_back)


def test_a_send_to_a_consumer_whose_endpoint_is_lost_ends_with_the_loss(make_pair, monkeypatch):
    pair, lost = make_pair(), PeerLostError("gone")
    _, _, send, receive = both_programs(pair, range(48), **SMALL)
    pair.serve(pair.ask(1, receive), send)
    pair.p.path.pump(0.0)  # more chunks are left than there are slots

    def endpoint_handle(endpoint):
        raise lost

    monkeypatch.setattr(pair.p.transport, "endpoint_handle", endpoint_handle)
    over = pair.until(lambda: pair.find(ev.SendOver, 1))
    assert over.error is lost
    assert pair.find(ev.LinkLost) == ev.LinkLost(pair.to_d, lost)


def test_nobody_can_guess_a_tag_that_a_receive_is_posted_for():
    found = [new_tags() for _ in range(40)]
    assert all(0 <= tag < 1 << 62 and tag % MAX_CHUNKS == 0 for tag in found)
    # each of 42 bits is set in about half of the tags: all or none of them once in 10^10 runs
    always, ever = reduce(and_, found), reduce(or_, found)
    assert (ever ^ always) >> 20 == (1 << 42) - 1


def test_shorter_chunk_fails_the_receive(make_pair):
    pair = make_pair()
    source, destination, _, _ = both_programs(pair, range(8), chunk_tokens=8, chunk_rows=4)
    receive = pair.d.program(destination, range(8), order="NHD", chunk_tokens=8, chunk_rows=4)
    send = pair.p.program(source, range(7), order="NHD", chunk_tokens=7, chunk_rows=4)
    pair.serve(pair.ask(1, receive), send)
    assert isinstance(pair.until(lambda: pair.find(ev.ReceiveFailed, 1)).error, MessageSizeError)
    pair.d.path.receives.drain(READS[1], 1)
    pair.until(lambda: pair.find(ev.ReceiveDrained, 1))
    assert not pair.d.dense(destination, range(8)).any()


@pytest.mark.parametrize("is_lost, expected", [(False, RegistrationError), (True, PeerLostError)])
def test_an_io_error_is_a_refused_registration_unless_ucx_reports_a_loss(
    make_pair, monkeypatch, is_lost, expected
):
    transport = make_pair().p.transport
    monkeypatch.setattr(transport._requests, "_may_have_lost_a_peer", lambda: is_lost)
    assert type(transport.error_of(abi.ERR_IO_ERROR, 0)) is expected


def test_inline_progress_does_not_let_another_thread_take_the_gil(make_pair):
    path = make_pair().d.path
    path.release(0.0)
    assert path.lock.try_acquire()
    may_run = threading.Lock()
    ran = []

    def wait_for_gil():
        with may_run:
            ran.append(True)

    may_run.acquire()
    thread = threading.Thread(target=wait_for_gil)
    thread.start()
    before = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    try:
        may_run.release()
        for _ in range(1000):
            path.poll_once()
        assert not ran
    finally:
        sys.setswitchinterval(before)
        thread.join(60.0)
        path.release(0.0)


def test_a_driver_that_has_worked_for_long_releases_gil_and_lock(monkeypatch):
    monkeypatch.setattr(pacing, "WORK_S", LONG_S)
    left = []

    @ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)
    def leave(microseconds):
        # a callback needs the GIL, as a thread does that waits for it
        left.append((microseconds, path.lock.try_acquire()))
        path.release(0.0)
        return 0

    pair = Pair.connect()
    path = pair.d.path
    path.state.record.usleep = ctypes.cast(leave, ctypes.c_void_p).value
    try:
        path.pump(0.0)
        assert not left
        monkeypatch.setattr(pacing, "WORK_S", 0.0)
        path.lock.notify()  # there is more to do
        path.pump(0.0)
        assert left == [(pacing.YIELD_GIL_US, True)]
        path.lock.clear_pending()
        path.pump(1e-3)  # others could have the GIL while this slept
        assert len(left) == 1
    finally:
        pair.close()


def test_the_driver_returns_at_once_with_what_was_reported(make_pair):
    path = make_pair().d.path
    reads = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64 * 2))
    def clock(_, now):
        reads.append(None)
        # no time passes, unless the loop goes on
        now.contents[:] = [0 if len(reads) < 100 else LONG_CLOCK_S, 0]
        return 0

    path.state.record.clock_gettime = ctypes.cast(clock, ctypes.c_void_p).value
    path.lock.notify()
    path.pump(1.0)
    assert len(reads) < 100


def _counting_clock(path):
    """Let a microsecond pass with each look at the clock. Returns the looks."""
    looks = []

    @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_int64 * 2))
    def clock(_, now):
        looks.append(None)
        now.contents[:] = [len(looks) // 1_000_000, len(looks) % 1_000_000 * 1000]
        return 0

    path.state.record.clock_gettime = ctypes.cast(clock, ctypes.c_void_p).value
    return looks, clock


@pytest.mark.parametrize("leaves_work", [False, True])
def test_the_loop_offers_work_before_it_returns_with_it(make_pair, leaves_work):
    """`leaves_work`: inline progress has left it for a turn, at once."""
    path = make_pair().d.path
    looks, _clock = _counting_clock(path)
    record = path.state.record
    record.spin_after_work_ns, record.offer_work_ns = 1 << 60, 300_000

    def begin():  # in the run, before its first pass
        if leaves_work:
            record.return_by_ns = 1
        else:
            path.lock.notify()
        return 0

    begun = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _: begin())
    record.begin = ctypes.cast(begun, ctypes.c_void_p).value
    num_looks = len(looks)
    path.pump(1.0)
    assert 300 <= len(looks) - num_looks < 1000
    assert path.lock.has_pending()


def test_the_loop_offers_work_only_to_engines_that_poll_and_keep_the_gil(make_pair, monkeypatch):
    path = make_pair().d.path

    def offered_ns():
        path.lock.has_pending()  # polls
        path.lock.has_pending()
        path.lock.notify()
        path.pump(1.0)
        return path.state.record.offer_work_ns

    monkeypatch.setattr(pacing, "LONG_STEP_NS", 1 << 60)
    monkeypatch.setattr(pacing, "LONG_GIL_WAIT_NS", 1 << 60)
    assert offered_ns() == 0
    monkeypatch.setattr(pacing, "LONG_GIL_WAIT_NS", -1)
    assert offered_ns() > 0
    monkeypatch.setattr(pacing, "LONG_STEP_NS", 0)
    assert offered_ns() == 0


def test_a_spinning_loop_hands_the_lock_over(make_pair, monkeypatch):
    monkeypatch.setattr(pacing, "ASK_FOR_LOCK_NS", round(DEADLINE_S * pacing.NS_PER_S))
    path = make_pair().d.path  # its lock is the driver's: here the spinner's
    path.state.record.spin_after_work_ns = 1 << 60
    spinner = threading.Thread(target=path.pump, args=(DEADLINE_S,))
    spinner.start()
    until(lambda: path.lock.is_looping)
    try:
        for _ in range(100):
            assert path.lock.try_acquire()
            assert not path.lock._words.wanted  # the loop would wait for nobody in each pass
            path.release(DEADLINE_S)
            assert path.lock.is_looping
    finally:
        path.lock.notify()
        spinner.join(DEADLINE_S)


def test_a_driver_is_starved_that_waits_long_for_the_gil(make_pair, monkeypatch):
    path = make_pair().d.path
    path.pump(0.0)
    monkeypatch.setattr(pacing, "LONG_GIL_WAIT_NS", -1)
    assert path.lock.is_starved
    monkeypatch.setattr(pacing, "LONG_GIL_WAIT_NS", 1 << 60)
    assert not path.lock.is_starved


def test_reported_work_is_for_the_thread_that_is_there_first(make_pair):
    """The driver's thread has left the loop with it, and waits for the GIL, which an engine's thread has."""
    path = make_pair().d.path
    sleeper = threading.Thread(target=path.pump, args=(DEADLINE_S,))
    sleeper.start()
    until(lambda: path.lock.is_looping)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(10 * DEADLINE_S)
    try:
        path.lock.notify()
        give_up_s = time.monotonic() + DEADLINE_S
        while path.lock.is_looping and time.monotonic() < give_up_s:
            pass
        assert path.lock.has_pending()
        assert path.lock.try_acquire()
        path.lock.clear_pending()
        path.release(0.0)
    finally:
        sys.setswitchinterval(interval_s)
        sleeper.join(DEADLINE_S)
    assert not path.lock.try_acquire()  # the driver's thread has it


def test_notifying_a_closed_data_path_writes_to_no_reused_descriptor(make_pair):
    pair = make_pair()
    path = pair.d.path
    number = path.state.wake_fd
    pair.close()
    others = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        os.dup2(others, number)
        path.lock.notify()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(others)
    finally:
        os.close(number)
        if others != number:
            os.close(others)


@pytest.mark.parametrize("num_tokens, is_large", [(48, True), (1, False)])
def test_only_large_reads_are_unpacked_past_the_processors_caches(make_pair, num_tokens, is_large):
    """What is packed is sent at once, and is read from the caches; what was unpacked is read much later."""
    pair = make_pair(min_streamed_bytes=1000)
    _, _, send, receive = both_programs(pair, range(num_tokens), **SMALL)
    assert (receive.source.total_bytes >= 1000) == is_large
    for side, half, packing in ((pair.p, send, True), (pair.d, receive, False)):
        jobs = side.path.copies.make_jobs(half.source, half.blocks, packing=packing)
        words, *_ = jobs.memory
        past_caches = set(words[copies_cpu._IS_STREAMED :: copies_cpu._JOB_WORDS])
        assert past_caches == {int(is_large and not packing)}
