"""Direct reads while another thread takes the producer's blocks back: right bytes or an error."""

import sys
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from kvconnector.datapath.pump import copies_cpu
from kvconnector.datapath.pump.copy_threads import CopyThreads
from kvconnector.errors import LeaseExpiredError
from kvconnector.layout import Watermark
from kvconnector.session import events as ev
from kvconnector.session.lease import lease_key
from tests.property.races import StaleBytesError
from tests.support.waiting import until
from tests.unit.datapath.caches import BLOCKS, Shape
from tests.unit.datapath.direct_pair import MANY_TOKENS, DirectPair, direct_read, give_up
from tests.unit.datapath.pump_pair import both_programs

pytestmark = pytest.mark.ucx

SHAPE = Shape(layers=2, heads=2, dim=64, block=16)
TOKENS = range(16 * BLOCKS)
CUT = {"chunk_tokens": 64, "chunk_rows": 4}
# The producer retracts earlier after a successful read and later after a refused one, so that both happen often on any
# machine.
EARLIER, LATER = 0.8, 1.25


class DirectRaces:
    """Reads of all of a producer's blocks, whose content differs for each lease."""

    def __init__(self, pair):
        self._pair = pair
        self._rng = np.random.default_rng(7)
        self._longest_s = 1e-3
        self.seen = Counter()

    def run(self, number):
        """Read under one lease, while the producer retracts it at a random time and writes other bytes."""
        p, d = self._pair.p, self._pair.d
        key = lease_key(str(number), "", ())
        content, next_content = 1 + number % 250, 1 + (number + 1) % 250
        for array in p.arrays.values():
            array[...] = content
        p.path.board.publish(key, Watermark(MANY_TOKENS))
        _, destination, theirs, program = both_programs(self._pair, TOKENS, **CUT)
        read = direct_read(number, theirs, program, TOKENS, transfer=str(number))
        begins = threading.Event()
        taker = threading.Thread(target=self._take_back, args=(begins, key, next_content))
        taker.start()
        begins.set()
        d.path.reads.submit(read)
        ended = self._until_over()
        taker.join()
        if isinstance(ended, ev.ReceiveFinished):
            found = d.dense(destination, TOKENS)
            if not (found == content).all():
                raise StaleBytesError(f"stale bytes under lease {number}")
            self.seen["read"] += 1
            self._longest_s *= EARLIER
        elif isinstance(ended, ev.ReceivePosted):  # the lease was gone before the read began
            give_up(self._pair, number)
            self.seen["sent"] += 1
            self._longest_s *= LATER
        else:
            assert isinstance(ended.error, LeaseExpiredError)
            self.seen["refused"] += 1
            self._longest_s *= LATER

    def _take_back(self, begins, key, content):
        """Retract the lease and overwrite the blocks, during the read or soon after it."""
        delay_s = float(self._rng.uniform(0.0, self._longest_s))
        while not begins.is_set():
            time.sleep(0.0)
        until_s = time.perf_counter() + delay_s
        while time.perf_counter() < until_s:
            time.sleep(0.0)
        self._pair.p.path.board.retract(key)
        for array in self._pair.p.arrays.values():
            array[...] = content

    def _until_over(self):
        kinds = ev.ReceivePosted | ev.ReceiveFinished | ev.ReceiveFailed

        def end():
            self._pair.d.path.pump(0.0)
            return next((each for each in self._pair.d.step() if isinstance(each, kinds)), None)

        return until(end, lambda: None)


@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("num_races", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_direct_reads_never_return_retracted_bytes(num_races, num_threads, show, monkeypatch):
    monkeypatch.setattr(CopyThreads, "num_idle", lambda threads: num_threads - 1)
    monkeypatch.setattr(copies_cpu, "SHARED_PIECE_BYTES", 1 << 12)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # lets the other thread run in between
    try:
        with closing(
            DirectPair.connect(SHAPE, replace(SHAPE, layout="NHD"), num_threads=num_threads)
        ) as pair:
            races = DirectRaces(pair)
            for number in range(1, num_races + 1):
                races.run(number)
    finally:
        sys.setswitchinterval(interval_s)
    seen = races.seen
    show(f"\n{dict(seen)}")
    assert seen.total() == num_races
    assert min(seen["read"], seen["refused"]) > num_races // 100, seen
