"""Counts what one small load takes in Python: functions of kvconnector that are called, and objects that are made.

A producer and a consumer run in this process over UCX, with their drivers' threads. The first loads create what all
loads share. The later ones are traced with `sys.setprofile`, from the consumer's order until both engines know that the
load has ended. Threads interleave differently each time, so only what every traced load does is counted. A function
counts once. Objects are new instances of kvconnector's classes among the functions' locals and results. What an
engine step without requests calls as well is counted apart: that belongs to the loop, not to the load.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import Any

from msgspec.structs import replace

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from kvconnector.session import WorkerOutput  # noqa: E402
from kvconnector.session.orders import LoadRequest, StepMetadata  # noqa: E402
from tests.integration import runtime_pair  # noqa: E402

new_engine: Any = runtime_pair.Engine
NUM_WARM, NUM_TRACED, NUM_TOKENS = 4, 12, 32
FOLDERS = (f"{ROOT}/kvconnector/", f"{ROOT}/kernels/")
SIDES = {"p": "producer", "d": "consumer"}


class Trace:
    """The calls and objects of each load, by side. `side` is the side whose worker the main thread calls."""

    def __init__(self) -> None:
        self.side = "d"
        self.is_on = False
        self.known: dict[int, object] = {}
        self.called: dict[str, list[Counter[str]]] = {side: [] for side in SIDES}
        self.made: dict[str, list[Counter[str]]] = {side: [] for side in SIDES}
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def begin(self) -> None:
        """Start tracing the next load."""
        for counters in (*self.called.values(), *self.made.values()):
            counters.append(Counter())
        self.is_on = True

    def _see(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(FOLDERS):
            return
        thread = threading.current_thread().name
        side = thread.split("-")[1] if thread.startswith("kvconnector-") else self.side
        if self.is_on and event == "call" and not code.co_name.startswith("<"):
            module = code.co_filename.removeprefix(f"{ROOT}/").removesuffix(".py")
            self.called[side][-1][f"{module}: {code.co_qualname}"] += 1
        for each in (*frame.f_locals.values(), value):
            if type(each).__module__.startswith("kvconnector") and id(each) not in self.known:
                self.known[id(each)] = each
                if self.is_on:
                    self.made[side][-1][type(each).__name__] += 1


def main(arguments: list[str]) -> int:
    """Trace direct and packed loads, and print the counts."""
    for path in ("direct", "packed"):
        trace, settings = Trace(), {"paths": {"direct": "auto" if path == "direct" else "never"}}
        with (
            closing(new_engine("p", "producer", **settings)) as p,
            closing(new_engine("d", "consumer", **settings)) as d,
        ):
            for number in range(NUM_WARM + NUM_TRACED):
                _load(trace, p, d, f"r{number}", is_traced=number >= NUM_WARM)
            idle = Trace()
            for _ in range(NUM_TRACED):
                _step(idle, p, d)
        threading.setprofile(None)
        sys.setprofile(None)
        for side, name in SIDES.items():
            called, made = (_common(counters[side]) for counters in (trace.called, trace.made))
            own = called.keys() - _common(idle.called[side]).keys()
            counts = f"{called.total()} calls, {made.total()} objects"
            print(
                f"{path}, {name}: {len(called)} functions, {len(own)} not in every step, {counts}"
            )
            if "--list" in arguments:
                marks = {each: " " if each in own else "*" for each in called}
                rows = [
                    f"  {count:3}{marks[each]} {each}\n" for each, count in sorted(called.items())
                ]
                print("".join(rows))
                print("".join(f"  {count:3} {each}\n" for each, count in sorted(made.items())))
    return 0


def _common(counters: list[Counter[str]]) -> Counter[str]:
    """Return the entries that are in all counters, each as often as in the counter with the fewest."""
    found = counters[0]
    for counter in counters:
        found = found & counter
    return found


def _step(trace: Trace, p: Any, d: Any) -> None:
    """Take a step without requests in each engine."""
    trace.begin()
    for side, engine in (("d", d), ("p", p)):
        trace.side = side
        engine.workers[0].start_step(StepMetadata())
        engine.workers[0].poll()
        engine.workers[0].wait(0.02)
    trace.is_on = False


def _load(trace: Trace, p: Any, d: Any, name: str, *, is_traced: bool) -> None:
    """Load two blocks with the calls that an engine makes to its workers."""
    d.load(name, p.offer(name, [1, 2], NUM_TOKENS), [3, 4], NUM_TOKENS + 1, steps=False)
    step = d.scheduler.build_step()
    loads = tuple(order for order in step.orders if isinstance(order, LoadRequest))
    others = tuple(order for order in step.orders if order not in loads)
    d.workers[0].start_step(replace(step, orders=others))
    time.sleep(0.2)  # until everything before the load is done
    if is_traced:
        trace.begin()
    d.workers[0].start_step(replace(step, orders=loads))
    loaded = _until_over(d, name)
    trace.side = "p"
    released = _until_over(p, name)
    trace.side, trace.is_on = "d", False
    for engine, outputs in ((d, loaded), (p, released)):
        for output in outputs:
            engine.scheduler.update(output)


def _until_over(engine: Any, name: str) -> list[WorkerOutput]:
    """Return what an engine's worker reports until a request has ended."""
    deadline_s, outputs = time.monotonic() + 20.0, list[WorkerOutput]()
    while time.monotonic() < deadline_s:
        outputs.append(engine.workers[0].poll())
        if name in outputs[-1].finished_recving | outputs[-1].finished_sending:
            return outputs
        engine.workers[0].wait(0.002)
    raise TimeoutError(f"{name} does not end")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
