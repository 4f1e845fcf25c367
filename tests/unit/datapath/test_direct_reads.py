"""Direct reads on the CPU: a consumer's data path reads a producer's pools, here in one process."""

import fcntl
import os
import subprocess
import threading
from contextlib import ExitStack, closing

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.config import PathsConfig
from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.pump import pacing
from kvconnector.datapath.pump.direct_reads import WAIT_FOR_LEASE_S
from kvconnector.errors import PeerLostError, TransportError
from kvconnector.layout import GroupBlocks, Watermark
from kvconnector.session import events as ev
from tests.support.examples import examples
from tests.support.fakes import FakeClock
from tests.unit.datapath.caches import BLOCKS, unlike_sides
from tests.unit.datapath.direct_pair import (
    CUT,
    KEY,
    MANY_TOKENS,
    DirectPair,
    direct_read,
    give_up,
    only_consumer_steps,
)
from tests.unit.datapath.pump_pair import READS, both_programs

pytestmark = pytest.mark.ucx

TOKENS = range(20)
MANY_STEPS = 20
LONG_S = 60.0


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def pair(clock):
    """A pair whose time stands still, and whose consumer reads directly whatever it can."""
    with closing(DirectPair.connect(clock=clock)) as opened:
        yield opened


def ask(pair, read_id):
    source, destination, theirs, ours = both_programs(pair, TOKENS, **CUT)
    pair.d.path.reads.submit(direct_read(read_id, theirs, ours, TOKENS))
    return source, destination


def pump_on(pair):
    for _ in range(MANY_STEPS):
        pair.d.path.pump(1.0)
        pair.events += pair.d.step()


def check_read(pair, source, destination):
    np.testing.assert_array_equal(pair.d.dense(destination, TOKENS), pair.p.dense(source, TOKENS))


@examples(30)
@given(data=st.data())
def test_any_geometry_arrives_byte_for_byte(data):
    p_shape, d_shape, tokens, window = data.draw(unlike_sides())
    cut = {"order": "NHD", "chunk_tokens": 7, "chunk_rows": 2, "heads": window}
    source, destination = (data.draw(st.permutations(range(BLOCKS))) for _ in range(2))
    # the producer's list begins with the first block that is needed
    first = tokens.start // p_shape.block if data.draw(st.booleans()) else 0
    past_caches = {"min_streamed_bytes": data.draw(st.sampled_from([0, 1 << 20]))}
    with closing(DirectPair.connect(p_shape, d_shape, **past_caches)) as pair:
        program = pair.d.program(list(destination), tokens, **cut)
        theirs = pair.p.program(list(source), tokens, **cut)
        blocks = (GroupBlocks.of(list(source)[first:], first),)
        pair.p.path.board.publish(KEY, Watermark(MANY_TOKENS))
        pair.d.path.reads.submit(direct_read(1, theirs, program, tokens, remote_blocks=blocks))
        only_consumer_steps(pair, 1, ev.ReceiveFinished)
        pair.check_arrived(list(source), list(destination), tokens, window)


@pytest.mark.parametrize("num_tokens", [None, 19, MANY_TOKENS])
def test_a_read_without_a_valid_lease_waits_a_little_and_is_packed(pair, clock, num_tokens):
    """There is no lease, it has fewer tokens, or it was retracted."""
    if num_tokens is not None:
        pair.p.path.board.publish(KEY, Watermark(num_tokens))
    if num_tokens == MANY_TOKENS:
        pair.p.path.board.retract(KEY)
    ask(pair, 1)
    pump_on(pair)
    assert pair.find(ev.ReceivePosted, 1) is None
    clock.advance(WAIT_FOR_LEASE_S)
    only_consumer_steps(pair, 1, ev.ReceivePosted)
    pair.p.path.board.publish(KEY[::-1], Watermark(MANY_TOKENS))
    pump_on(pair)
    assert pair.find(ev.ReceiveFinished, 1) is None  # the producer has been asked
    give_up(pair, 1)


def test_a_read_before_its_lease_is_made_once_the_lease_is_published(pair):
    source, destination = ask(pair, 1)
    pump_on(pair)
    pair.p.path.board.publish(KEY, Watermark(MANY_TOKENS))
    only_consumer_steps(pair, 1, ev.ReceiveFinished)
    check_read(pair, source, destination)
    assert pair.find(ev.ReceiveFinished, 1).path == "direct"


def test_a_sleeping_driver_finds_the_lease_of_a_read_submitted_inline(pair, monkeypatch):
    monkeypatch.setattr(pacing, "CHECK_PEERS_S", LONG_S)  # leases are looked for more often
    sleeper = threading.Thread(target=lambda: pair.d.path.pump(LONG_S), daemon=True)
    sleeper.start()
    while not pair.d.path.lock.try_acquire():
        sleeper.join(1e-3)
    ask(pair, 1)
    pair.d.path.release(LONG_S)
    sleeper.join(LONG_S / 2)
    assert not sleeper.is_alive()


def test_a_lease_on_memory_that_replaced_what_is_mapped_is_sent(pair, clock):
    """The consumer need not have heard that the memory is another one."""
    board = pair.p.path.board
    board.publish(KEY, Watermark(MANY_TOKENS))
    ask(pair, 1)
    board.retract(KEY)
    board.memory.withdraw()
    board.publish(KEY, Watermark(MANY_TOKENS))
    only_consumer_steps(pair, 1, ev.ReceiveFailed)
    ask(pair, 2)
    pump_on(pair)
    clock.advance(WAIT_FOR_LEASE_S)
    only_consumer_steps(pair, 2, ev.ReceivePosted)
    give_up(pair, 2)


def test_caches_with_other_memory_than_the_one_that_is_shared_are_sent(pair, clock, monkeypatch):
    path = pair.p.path
    assert not path.renew()
    assert path.export is pair.export
    monkeypatch.setattr(path.board.memory, "is_intact", lambda: False)
    assert path.renew()
    assert path.export is None
    path.board.publish(KEY, Watermark(MANY_TOKENS))
    ask(pair, 1)
    pump_on(pair)
    clock.advance(WAIT_FOR_LEASE_S)
    only_consumer_steps(pair, 1, ev.ReceivePosted)
    give_up(pair, 1)


@pytest.mark.parametrize("waits", [True, False], ids=["for its lease", "for nothing"])
def test_stopped_read_writes_nothing_more(pair, waits):
    if not waits:
        pair.p.path.board.publish(KEY, Watermark(MANY_TOKENS))
    _, destination = ask(pair, 1)
    pair.stop(1)
    if waits:
        pair.p.path.board.publish(KEY, Watermark(MANY_TOKENS))
    only_consumer_steps(pair, 1, ev.ReceiveDrained)
    assert pair.events[-2:] == [ev.ReceiveStopped(READS[1]), ev.ReceiveDrained(READS[1])]
    assert not pair.d.dense(destination, TOKENS).any()
    # the row can be used again
    ask(pair, 2)
    only_consumer_steps(pair, 2, ev.ReceiveFinished)


def test_closed_export_ends_when_its_reads_do(pair, monkeypatch):
    ended = []
    monkeypatch.setattr(RemotePools, "close", lambda pools: ended.append("unmapped"))
    pair.p.path.board.publish(KEY, Watermark(MANY_TOKENS))
    source, destination = ask(pair, 1)
    pair.d.path.reads.close(pair.to_p, lambda: ended.append("then"))
    assert ended == []
    ask(pair, 2)
    only_consumer_steps(pair, 1, ev.ReceiveFinished)
    assert ended == ["unmapped", "then"]
    check_read(pair, source, destination)
    assert pair.find(ev.ReceivePosted, 2) is not None  # sent
    give_up(pair, 2)


@pytest.mark.parametrize("has_died", [True, False])
def test_reads_that_wait_are_sent_once_the_producer_has_died_or_is_forgotten(
    pair, monkeypatch, has_died
):
    def look(*arguments):
        raise PeerLostError("gone")

    ask(pair, 1)
    ask(pair, 2)
    if has_died:
        monkeypatch.setattr(RemotePools, "is_published", look)
    else:
        pair.d.path.reads.close(pair.to_p)
    for read_id in (1, 2):
        only_consumer_steps(pair, read_id, ev.ReceivePosted)
        give_up(pair, read_id)


def test_worker_closes_while_a_read_waits(pair):
    ask(pair, 1)
    pair.d.path.close()


def shared_file(nbytes, seals=fcntl.F_SEAL_SHRINK):
    """Return a descriptor of memory that could be a producer's."""
    fd = os.memfd_create("elsewhere", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def test_false_exports_are_refused(pair, tmp_path):
    pair.d.path.reads.close(pair.to_p)
    os.mkfifo(tmp_path / "fifo")
    process = subprocess.Popen(["sleep", "100"])
    with ExitStack() as stack:
        fds = [
            os.open(tmp_path / "fifo", os.O_RDWR),
            shared_file(1 << 30, seals=fcntl.F_SEAL_GROW),
            shared_file(4096),
            shared_file(1 << 30),
        ]
        stack.callback(lambda: [os.close(fd) for fd in fds])
        for change, text in (
            ({"nonce": bytes(16)}, "another process"),
            ({"pid": process.pid, "fd": 1 << 20}, "another process"),
            ({"fd": fds[0]}, "cannot be mapped"),
            ({"fd": fds[1]}, "not sealed against"),
            ({"fd": fds[2]}, "the export names more"),
            ({"fd": fds[3]}, "another process"),
            ({"device": "cuda"}, "another kind of device"),
        ):
            with pytest.raises(TransportError, match=text):
                pair.d.path.reads.open(pair.to_p, msgspec.structs.replace(pair.export, **change))
    process.kill()
    process.wait()
    gone = msgspec.structs.replace(pair.export, pid=process.pid)
    with pytest.raises(PeerLostError):
        pair.d.path.reads.open(pair.to_p, gone)


def test_pools_that_cannot_be_read_are_a_warning_if_they_always_should_be(caplog):
    with closing(DirectPair.connect(paths=PathsConfig(direct="always"))) as pair:
        pair.d.path.reads.close(pair.to_p)
        elsewhere = msgspec.structs.replace(pair.export, nonce=bytes(16))
        with pytest.raises(TransportError, match="another process"):
            pair.d.path.reads.open(pair.to_p, elsewhere)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "paths.direct is always" in caplog.text
