"""The pumped data path over real UCX: bytes, slots, stops, failures, and how often it comes back to Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import reduce
from operator import and_, or_

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnector.datapath.endpoints import new_tags
from kvconnector.session import events as ev
from kvconnector.topology import Stripe
from kvconnector.transport import MessageSizeError
from kvconnector.transport.base import CONTROL_TAG_BIT, ControlMessage
from kvconnector.wire.messages import MAX_CHUNKS
from kvconnector_kernels.pump import records as r
from tests.unit.datapath.caches import BLOCKS, LAYOUTS, Shape, unlike_sides
from tests.unit.datapath.pump_pair import (
    DEADLINE_S,
    QUARANTINE_S,
    STRIPES,
    TO_D,
    Pair,
    Side,
    Striped,
    both_programs,
    slots_are_free,
)

pytestmark = pytest.mark.ucx
SMALL = {"chunk_tokens": 1, "chunk_rows": 1}


@settings(max_examples=20)
@given(data=st.data())
def test_any_geometry_arrives_byte_for_byte(data: st.DataObject) -> None:
    p_shape, d_shape, tokens, window = data.draw(unlike_sides())
    cut = {
        "order": data.draw(st.sampled_from(LAYOUTS)),
        "chunk_tokens": data.draw(st.integers(1, 20)),
        "chunk_rows": data.draw(st.integers(1, 4)),
        "heads": window,
    }
    # blocks in a row may be sent from where they are
    source = data.draw(st.one_of(st.permutations(range(BLOCKS)), st.just(range(BLOCKS))))
    destination = data.draw(st.permutations(range(BLOCKS)))
    slot_bytes = 4 * 20 * p_shape.heads * p_shape.dim * p_shape.item
    p, d = (
        Side(
            shape,
            slot_bytes=slot_bytes,
            num_slots=data.draw(st.integers(1, 3)),
            seed=seed,
            min_streamed_bytes=data.draw(st.sampled_from([0, 1 << 20])),
            min_in_place_bytes=data.draw(st.sampled_from([0, 1 << 20])),
        )
        for shape, seed in ((p_shape, 3), (d_shape, None))
    )
    pair = Pair(p, d)
    try:
        receive = d.program(list(destination), tokens, **cut)
        pair.serve(pair.ask(1, receive), p.program(list(source), tokens, **cut))
        pair.until(lambda: bool(pair.find(ev.ReceiveFinished) and pair.find(ev.SendFinished)))
        pair.check_arrived(list(source), list(destination), tokens, window)
        assert slots_are_free(pair)
        assert [record.nbytes for record in d.path.take_records()] == [receive.total_bytes]
    finally:
        pair.close()


@pytest.mark.parametrize("stripe", STRIPES)
@pytest.mark.parametrize("strided", ["source", "destination"])
def test_evenly_spaced_tokens_are_gathered_and_spread(
    make_pair: Callable[..., Pair], strided: str, stripe: Stripe
) -> None:
    pair = make_pair(*Striped.SHAPES)
    read = Striped(pair, strided, stripe, order="HND")
    pair.serve(pair.ask(1, read.receive), read.send)
    pair.until(lambda: bool(pair.find(ev.ReceiveFinished) and pair.find(ev.SendFinished)))
    read.check_arrived()


def test_many_reads_share_few_slots(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair(Shape(blocks=BLOCKS), Shape(blocks=BLOCKS, layout="NHD"), num_slots=2)
    reads = range(1, 9)
    sends = {}
    for read in reads:
        tokens = range(4 * read, 4 * read + 4)
        _, _, send, receive = both_programs(pair, tokens, chunk_tokens=1, chunk_rows=1)
        sends[read] = send
        pair.d.path.submit_receive(read, receive)
    served = set()

    def serve_what_is_posted() -> bool:
        for read in reads:
            posted = pair.find(ev.ReceivePosted, read)
            if posted is not None and read not in served:
                served.add(read)
                pair.serve(posted, sends[read])
        return all(pair.find(ev.ReceiveFinished, read) for read in reads)

    pair.until(serve_what_is_posted)
    tokens = range(4, 36)
    source, destination, _, _ = both_programs(pair, tokens, chunk_tokens=1, chunk_rows=1)
    np.testing.assert_array_equal(pair.d.dense(destination, tokens), pair.p.dense(source, tokens))
    pair.until(lambda: slots_are_free(pair))
    posted = [event.read_id for event in pair.events if isinstance(event, ev.ReceivePosted)]
    assert posted == list(reads)  # in the order of submission


def test_each_worker_sends_and_receives_at_once(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    tokens = range(5, 40)
    source, destination, send, receive = both_programs(pair, tokens, chunk_tokens=3, chunk_rows=1)
    tag, nbytes = pair.p.path.expect_warm_up(TO_D)
    pair.d.path.open_endpoint(TO_D, pair.p.transport.address, tag, nbytes)
    there = pair.ask(1, receive)
    pair.p.path.submit_receive(
        2, pair.p.program([0], range(4), order="HND", chunk_tokens=1, chunk_rows=2)
    )
    pair.until(lambda: pair.find(ev.ReceivePosted, 2) is not None)
    back = pair.find(ev.ReceivePosted, 2)
    pair.serve(there, send)
    pair.d.path.submit_send(
        TO_D,
        2,
        pair.d.program([11], range(4), order="HND", chunk_tokens=1, chunk_rows=2),
        first_tag=back.first_tag,
        window=back.window,
    )
    pair.until(lambda: all(pair.find(ev.ReceiveFinished, read) for read in (1, 2)))
    np.testing.assert_array_equal(pair.d.dense(destination, tokens), pair.p.dense(source, tokens))
    assert not pair.p.dense([0], range(4)).any()  # zeros came back


def test_stopped_send_tells_how_much_it_sent_and_the_receive_drains(
    make_pair: Callable[..., Pair],
) -> None:
    pair = make_pair()
    tokens = range(48)
    _, _, send, receive = both_programs(pair, tokens, chunk_tokens=1, chunk_rows=1)
    pair.serve(pair.ask(1, receive), send)
    pair.p.path.pump(0.0, ())  # packs and posts the first ones
    pair.p.path.stop_send(TO_D, 1)
    pair.until(lambda: pair.find(ev.SendStopped) is not None)
    stopped = pair.find(ev.SendStopped)
    assert stopped.error is None
    assert 0 < stopped.sent_chunks < len(send.chunks)
    pair.d.path.stop_receive(1)
    pair.d.path.drain_receive(1, stopped.sent_chunks)
    pair.until(lambda: pair.find(ev.ReceiveDrained, 1) is not None)
    assert pair.find(ev.ReceiveStopped, 1) is not None
    pair.until(lambda: slots_are_free(pair))
    # tags and slots are as good as new
    _, _, send, receive = both_programs(pair, tokens, chunk_tokens=5, chunk_rows=2)
    pair.serve(pair.ask(2, receive), send)
    pair.until(lambda: pair.find(ev.ReceiveFinished, 2) is not None)


def test_a_cancelled_receive_that_does_not_end_loses_its_slot_and_its_memory(
    make_pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = [0.0]
    pair = make_pair(num_slots=2, clock=lambda: time.monotonic() + ahead_s[0])
    source, destination, send, receive = both_programs(pair, range(48), **SMALL)
    pair.ask(1, receive)
    pair.step()  # posts what was promised
    machine = pair.d.path.machine
    addresses = set(machine.recv_slots.rows["address"].tolist())
    cancel = machine.network.cancel
    held: list[int] = []
    monkeypatch.setattr(machine.network, "cancel", held.append)
    pair.d.path.stop_receive(1)
    pair.d.path.drain_receive(1, None)
    pair.until(lambda: pair.find(ev.ReceiveStopped, 1) is not None)
    ahead_s[0] = QUARANTINE_S / 2
    for _ in range(20):
        pair.step()
    assert pair.find(ev.ReceiveDrained, 1) is None
    ahead_s[0] = QUARANTINE_S + 1
    pair.until(lambda: pair.find(ev.ReceiveDrained, 1) is not None)
    # others receive into other memory, whatever becomes of what UCX still holds
    assert addresses.isdisjoint(machine.recv_slots.rows["address"].tolist())
    pair.serve(pair.ask(2, receive), send)
    pair.until(lambda: pair.find(ev.ReceiveFinished, 2) is not None)
    np.testing.assert_array_equal(
        pair.d.dense(destination, range(48)), pair.p.dense(source, range(48))
    )
    assert len(held) == 2
    for request in held:
        cancel(request)
    pool = machine.recv_slots.pool

    def memory_is_back() -> bool:
        ahead_s[0] += 1.0
        pair.d.path.step()
        return {address for _, address in pool._spare} == addresses

    pair.until(memory_is_back)


def test_nobody_can_guess_a_tag_that_a_receive_is_posted_for() -> None:
    found = [new_tags() for _ in range(40)]
    assert all(0 <= tag < 1 << 62 and tag % MAX_CHUNKS == 0 for tag in found)
    # each of 42 bits is one in about half of the blocks: none is always or never, but for once in 10^10 runs
    always, ever = reduce(and_, found), reduce(or_, found)
    assert (ever ^ always) >> 20 == (1 << 42) - 1


def test_shorter_chunk_fails_the_receive(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    source, destination, _, _ = both_programs(pair, range(8), chunk_tokens=8, chunk_rows=4)
    receive = pair.d.program(destination, range(8), order="NHD", chunk_tokens=8, chunk_rows=4)
    send = pair.p.program(source, range(7), order="NHD", chunk_tokens=7, chunk_rows=4)
    pair.serve(pair.ask(1, receive), send)
    pair.until(lambda: pair.find(ev.ReceiveFailed, 1) is not None)
    assert isinstance(pair.find(ev.ReceiveFailed, 1).error, MessageSizeError)
    pair.d.path.drain_receive(1, 1)
    pair.until(lambda: pair.find(ev.ReceiveDrained, 1) is not None)
    assert not pair.d.dense(destination, range(8)).any()


def test_pump_returns_when_a_control_message_comes(make_pair: Callable[..., Pair]) -> None:
    pair = make_pair()
    _, _, _, receive = both_programs(pair, range(8), chunk_tokens=1, chunk_rows=1)
    pair.ask(1, receive)
    endpoint = pair.p.transport.connect(pair.d.transport.address)
    tag, payload = CONTROL_TAG_BIT | 9, bytes(100)
    pair.p.transport.send_control(endpoint, tag, payload)
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            pair.p.transport.progress()

    server = threading.Thread(target=serve)
    server.start()
    try:
        reason = pair.d.path.machine.run(DEADLINE_S, wants_slots=False)
    finally:
        ended.set()
        server.join()
    assert reason == r.READABLE
    # it is still there, and shows until it is taken
    assert pair.d.path.machine.run(DEADLINE_S, wants_slots=False) == r.READABLE
    assert pair.d.transport.receive_control({tag: 100}) == [ControlMessage(tag, payload)]
    assert pair.d.path.machine.run(0.0, wants_slots=False) == r.TIMEOUT
    pair.d.path.stop_receive(1)
    pair.d.path.drain_receive(1, None)
