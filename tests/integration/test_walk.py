"""ARCHITECTURE.md's walk through one load: a load calls its functions, on the side and in the order that it says."""

import re
import sys
import threading
from contextlib import closing
from pathlib import Path

import pytest

from tests.integration.runtime_pair import PEER, Engine

pytestmark = [pytest.mark.ucx, pytest.mark.integration]

ROOT = Path(__file__).parents[2]
EARLY = "ProducerSession._early_read"
"""What happens only to a read that comes before its lease."""
TIMES = 40


def steps_of(path):
    """Return the walk's functions in Python on a path: the side, and file and name."""
    walk = (ROOT / "ARCHITECTURE.md").read_text().partition("## A walk")[2].partition("\n## ")[0]
    start, direct, packed, end = re.split(r"\n(?=Direct, and P|Packed, D asks|Both: )", walk)
    items = re.split(r"\n(?=\d+\. )", start + (direct if path == "direct" else packed) + end)
    steps, file = [], ""
    for item in items:
        side = "p" if re.match(r"\d+\. P: ", item) else "d"
        for word in re.findall(r"`([\w./]+)`", item):
            if word.endswith((".py", ".c")):
                file = word
            elif file.endswith(".py") and word != EARLY:
                steps.append((side, f"{file} {word}"))
    return steps


class Recorder:
    """The first calls of each side's functions, in order. `side` is that of the engine that the main thread calls."""

    def __init__(self):
        self.side, self.seen = "d", {"d": {}, "p": {}}

    def see(self, frame, event, argument):
        file = frame.f_code.co_filename
        if event == "call" and "/kvconnector/" in file:
            thread = threading.current_thread().name
            side = thread.split("-")[1] if thread.startswith("kvconnector-") else self.side
            name = f"{file.rpartition('/kvconnector/')[2]} {frame.f_code.co_qualname}"
            self.seen.get(side, {}).setdefault(name)

    def take(self):
        seen, self.seen = self.seen, {"d": {}, "p": {}}
        return seen


@pytest.mark.parametrize("path", ["direct", "packed"])
def test_the_functions_of_the_walk_carry_a_load(path):
    steps, recorder = steps_of(path), Recorder()
    assert len(steps) > 20
    # heartbeats call some of these functions, too, at any time
    peer = {**PEER, "heartbeat_interval_s": 10}
    settings = {"paths": {"direct": "auto" if path == "direct" else "never"}, "peer": peer}
    missing = {*steps}
    threading.setprofile(recorder.see)
    sys.setprofile(recorder.see)
    try:
        with (
            closing(Engine("p", "producer", **settings)) as p,
            closing(Engine("d", "consumer", **settings)) as d,
        ):

            def step_both():
                for recorder.side, engine in (("d", d), ("p", p)):
                    engine.step()
                    engine.workers[0].wait(0.002)

            idle = {"d": {}, "p": {}}
            for number in range(TIMES):
                name = f"r{number}"
                recorder.side = "p"
                params = p.offer(name, [1, 2], 32)
                for _ in range(4):
                    step_both()
                for side, names in recorder.take().items() if number else ():
                    idle[side] |= names
                recorder.side = "d"
                d.load(name, params, [3, 4], 33)
                while not (name in d.received and name in p.sent):
                    step_both()
                assert name not in d.failed
                if number == 0:
                    continue  # it greets
                seen = recorder.take()
                missing -= {(side, each) for side, each in steps if each in seen[side]}
                for side in ("d", "p"):
                    own = [each for of, each in steps if of == side and each in seen[side]]
                    own = [each for each in dict.fromkeys(own) if each not in idle[side]]
                    assert own == [each for each in seen[side] if each in own]
                if not missing and number > 3:
                    break
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    assert not missing
