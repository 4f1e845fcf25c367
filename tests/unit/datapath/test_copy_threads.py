"""Direct reads that several threads copy: right bytes, and no end before the last thread has left."""

import ctypes
import errno
import os
import threading
from contextlib import closing
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.pump import copies_cpu, copy_threads
from kvconnector.datapath.pump.copy_threads import CopyThreads, default_threads
from kvconnector.layout import Watermark
from kvconnector.session import events as ev
from kvconnector_kernels.pump.copy_cpu import READ
from kvconnector_kernels.pump.records import ALL, MORE
from tests.kernels.pump.test_read_cpu import job_of, read_of
from tests.kernels.relayout.pools import DTYPES, Pool, Window, check_copy_equals_naive, windows
from tests.support.examples import examples
from tests.support.waiting import until
from tests.unit.datapath.direct_pair import KEY, MANY_TOKENS, DirectPair, only_consumer_steps
from tests.unit.datapath.test_direct_reads import ask, check_read

HELPER, OPEN = 1 << 16, 1 << 30
"""The amount that each helper adds to a read's fence, and the flag that others may join."""


@pytest.fixture(scope="module")
def threads():
    with closing(CopyThreads(3)) as opened:
        yield opened


class SharedReader:
    """Reads with helpers, as the pump does."""

    def __init__(self, threads):
        self._context = threads.address
        self._read = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)(READ)
        self.fence = np.zeros(1, np.int32)

    def call(self, read):
        return self._read(self._context, read.ctypes.data, self.fence.ctypes.data, 1)

    def finish(self, read):
        while (status := self.call(read)) == MORE:
            pass
        assert status == ALL
        until(lambda: self.fence[0] == 1)


def shared(*jobs, piece_bytes):
    read = read_of(*jobs, piece_bytes=piece_bytes)
    read[3] = 3
    return read


@examples(60)
@given(data=st.data())
def test_any_read_by_several_threads_equals_the_naive_copy(threads, data):
    counts = {name: data.draw(st.integers(1, 4)) for name in ("num_parts", "num_heads")}
    counts["num_tokens"] = data.draw(st.integers(0, 60))
    sizes = {
        "head_dim": data.draw(st.integers(1, 9)),
        "item": data.draw(st.sampled_from(sorted(DTYPES))),
    }
    src, dst = (data.draw(windows(**counts, **sizes)) for _ in range(2))
    src.pool.fill_random()
    piece_bytes = data.draw(st.sampled_from([1, 16, 200, 4096]))

    def copy(src_side, dst_side, **counts):
        read = shared(job_of(src_side, dst_side, **counts), piece_bytes=piece_bytes)
        SharedReader(threads).finish(read)

    check_copy_equals_naive(copy, src, dst, **counts)


def test_helpers_go_on_while_the_driver_is_elsewhere_and_a_read_is_over_once_they_have_left(
    threads,
):
    """The driver makes one call for a read of 8 MiB."""
    src, dst = (Pool("NHD", 16, 128, 16, 64, 2) for _ in range(2))

    def copy(*sides, **counts):
        reader = SharedReader(threads)
        read = shared(job_of(*sides, **counts), piece_bytes=1 << 16)
        status = reader.call(read)
        until(lambda: read[1] >= 128 and reader.fence[0] & (0x3FFF * HELPER) == 0)
        if status == MORE:  # otherwise the helpers were faster
            assert reader.fence[0] != 1
            assert reader.call(read) == ALL
        assert reader.fence[0] == 1

    windows = Window(src.fill_random()), Window(dst)
    check_copy_equals_naive(copy, *windows, num_parts=2, num_heads=16, num_tokens=2048)


def test_helpers_have_one_read_at_a_time(threads):
    """A read that begins while a helper is in another read is not shared; the next one is."""
    first, second, third = (SharedReader(threads) for _ in range(3))
    reads = [shared(piece_bytes=1) for _ in range(3)]
    first.finish(reads[0])
    first.fence[0] += HELPER
    second.finish(reads[1])
    first.fence[0] -= HELPER
    third.finish(reads[2])
    assert [int(read[3]) for read in reads] == [0, 3, 0]


@pytest.mark.ucx
class TestInTheDataPath:
    @pytest.fixture
    def pair(self):
        with (
            patch.object(CopyThreads, "num_idle", lambda threads: 3),
            patch.object(copies_cpu, "SHARED_PIECE_BYTES", 64),
            closing(DirectPair.connect(num_threads=4)) as opened,
        ):
            opened.p.path.board.publish(KEY, Watermark(MANY_TOKENS))
            yield opened

    def test_reads_one_after_the_other(self, pair):
        for read_id in range(1, 50):
            source, destination = ask(pair, read_id)
            only_consumer_steps(pair, read_id, ev.ReceiveFinished)
            check_read(pair, source, destination)

    @pytest.mark.parametrize("stops", [True, False], ids=["stopped", "all begun"])
    def test_a_read_is_over_only_when_the_last_helper_has_left(self, pair, stops):
        fences, helpers = [], []

        @ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 4)
        def read_function(context, jobs, fence, value):
            helpers.append((ctypes.c_int64 * 4).from_address(jobs)[3])
            fences.append(np.ctypeslib.as_array((ctypes.c_int32 * 1).from_address(fence)))
            fences[-1][0] = HELPER + (OPEN if stops else value)
            return MORE if stops else ALL

        pair.d.path.copies.read_function = ctypes.cast(read_function, ctypes.c_void_p).value
        ask(pair, 1)
        pair.d.path.pump(1e-3)
        if stops:
            pair.stop(1)
        for _ in range(20):
            pair.d.path.pump(1e-3)
            pair.events += pair.d.step()
        kind = ev.ReceiveStopped if stops else ev.ReceiveFinished
        assert pair.find(kind, 1) is None
        fences[-1][0] -= HELPER
        only_consumer_steps(pair, 1, kind)
        assert set(helpers) == {3}

    def test_close_ends_the_threads_in_the_middle_of_a_read(self, pair):
        before = threading.active_count()
        ask(pair, 1)
        pair.d.path.pump(0.0)
        pair.d.path.close()
        assert threading.active_count() == before - 3


@pytest.mark.parametrize("num_started", [0, 2])
def test_fewer_helpers_do_if_the_system_refuses_threads(num_started, monkeypatch, caplog):
    start = threading.Thread.start

    def start_some(thread):
        if sum(each.name == "kvc-copy" for each in threading.enumerate()) == before + num_started:
            raise RuntimeError("can't start new thread")
        start(thread)

    before = sum(each.name == "kvc-copy" for each in threading.enumerate())
    files = os.listdir("/proc/self/fd")
    monkeypatch.setattr(threading.Thread, "start", start_some)
    monkeypatch.setattr(os, "cpu_count", lambda: 1 << 20)
    with closing(CopyThreads(3)) as opened:
        assert opened.num_idle() == num_started
    assert f"only {num_started} of 3" in caplog.text
    assert os.listdir("/proc/self/fd") == files


def test_without_descriptors_there_are_no_helpers_and_none_is_kept(monkeypatch):
    def fail(*_):
        raise OSError(errno.EMFILE, "no descriptor is free")

    files = os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "eventfd", fail)
    with pytest.raises(OSError, match="no descriptor"):
        CopyThreads(3)
    assert os.listdir("/proc/self/fd") == files


def test_only_idle_cores_help(threads, monkeypatch, tmp_path):
    load = tmp_path / "loadavg"
    monkeypatch.setattr(copy_threads, "_LOAD", str(load))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    for running, helpers in ((1, 3), (6, 2), (8, 0), (30, 0)):
        load.write_text(f"0.10 0.20 0.30 {running}/900 1234\n")
        with closing(CopyThreads(3)) as opened:
            assert opened.num_idle() == helpers


@pytest.mark.parametrize("cores, threads", [(1, 1), (2, 1), (4, 2), (8, 4), (64, 4)])
def test_the_default_is_half_of_the_cores_that_the_process_may_use(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    assert default_threads() == threads
    config = {"engine_id": "d", "control": {"insecure": True}, "paths": {"copy_threads": 2}}
    assert ConnectorConfig.from_mapping(config).paths.copy_threads == 2
