"""Engines with very many requests in their queues.

As a program, it lets two engines on this host serve the number of requests in its first argument, and prints how long
the connector delayed their steps: `PYTHONPATH=examples python -m tests.hosts.long_queues 10000`. With `--no-stream` the
prompts are computed before they are requested; with `--no-freeze` the garbage collector traverses the whole process.
"""

import gc
import os
import sys
import threading
import time
from contextlib import ExitStack, closing

import numpy as np

from kvconnector.ids import new_secret
from tests.integration.runtime_pair import Engine
from tests.support.remote import RemoteObject

NUM_BLOCKS = 64
BLOCK_TOKENS = 16
STEP_REQUESTS = 500
"""New requests per step."""
LOOK_AHEAD = 4 * NUM_BLOCKS


class QueueEngine(Engine):
    """An engine whose requests have a block each; request `n` is in block `n % NUM_BLOCKS` of either engine."""

    def __init__(self, engine_id, role, address, **settings):
        control = {"host": address, "insecure_network": True}
        shape = {"block": BLOCK_TOKENS, "num_blocks": NUM_BLOCKS}
        super().__init__(engine_id, role, shape=shape, control=control, **settings)
        self.place = address, self.config.control.port

    def params(self):
        """The address of this engine that a router knows from an earlier answer."""
        params = self.scheduler.offer("known", blocks=[[0]], num_tokens=BLOCK_TOKENS)
        self.scheduler.abort("known")
        self.run_for(0.5)
        return {key: params[key] for key in ("remote_engine_id", "remote_host", "remote_port")}

    def ask(self, names, params):
        """Queue all of these requests at once, as a router does."""
        for number, name in enumerate(names):
            self.scheduler.on_new_request(name, {**params, "transfer_id": name})
            if number % STEP_REQUESTS == 0:
                self.step()
        self.step()

    def run_for(self, seconds):
        """Take steps without new requests."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.step()
            time.sleep(0.02)

    def content(self):
        """Return all blocks' tokens, by group, layer and part: `[head, token, dim]`."""
        return self.dense([*range(NUM_BLOCKS)], NUM_BLOCKS * BLOCK_TOKENS)

    def compute(self, names, deadline_s):
        """Compute requests in turn, as blocks become free. Returns those whose blocks were not freed in time."""
        until_s = time.monotonic() + deadline_s
        for first in range(0, len(names), NUM_BLOCKS):
            wave = names[first : first + NUM_BLOCKS]
            for block, name in enumerate(wave):
                self.scheduler.offer(name, blocks=[[block]], num_tokens=BLOCK_TOKENS)
            while not self.sent >= {*wave} and time.monotonic() < until_s:
                self.step()
                self.workers[0].wait(0.01)
        return sorted({*names} - self.sent)

    def load_all(self, names, expected, deadline_s):
        """Load each request once the producer has begun it. Returns those not loaded, loaded wrongly, and failed."""
        until_s = time.monotonic() + deadline_s
        wrong, first = [], 0
        asked = set()
        while first < len(names) and time.monotonic() < until_s:
            for number in range(first, min(len(names), first + LOOK_AHEAD)):
                name = names[number]
                if name not in asked and not self.scheduler.is_early(name):
                    asked.add(name)
                    count, _ = self.scheduler.matched_tokens(name, BLOCK_TOKENS + 1, 0)
                    self.scheduler.load(name, blocks=[[number % NUM_BLOCKS]], num_tokens=count)
            self.step()
            self.workers[0].wait(0.01)
            while first < len(names) and names[first] in self.received:
                if not self._is_same(first % NUM_BLOCKS, expected):
                    wrong.append(names[first])
                self.scheduler.finish(names[first])
                first += 1
        return [name for name in names if name not in self.received], wrong, self.failed

    def _is_same(self, block, expected):
        loaded = self.dense([block], BLOCK_TOKENS)
        tokens = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        return all(np.array_equal(loaded[key], expected[key][:, tokens]) for key in loaded)

    def give_up(self, names):
        """Abort all of these in one step."""
        for name in names:
            self.scheduler.abort(name)
        self.step()
        self.run_for(1.0)

    def offer_late(self, names, deadline_s):
        """Offer requests that their consumer has given up: none of them may hold a block for a whole lease."""
        self.sent.clear()
        return self.compute(names, deadline_s)


class TimedEngine(QueueEngine):
    """An engine that measures the connector's time in each step: `build_step`, `start_step`, `poll` and `update`.

    On a busy machine most of a long step is spent waiting for a processor: by this thread, and by the driver's while
    this one waits for the GIL. The rest is the delay that the connector causes.
    """

    def __init__(self, engine_id, role, address, *, freezes=True, **settings):
        super().__init__(engine_id, role, address, **settings)
        self._freezes = freezes
        self._steps, self._collections = [], [0.0]
        self._schedstats = {}
        self._collecting_since = 0.0

    def begin_timing(self):
        gc.collect()
        if self._freezes:
            gc.freeze()  # as vLLM does once it has started
        gc.callbacks.append(self._on_collection)

    def _on_collection(self, phase, _info):
        now = time.thread_time()
        if phase == "start":
            self._collecting_since = now
        else:
            self._collections.append(now - self._collecting_since)

    def step(self):
        before = self._clocks()
        began = time.perf_counter()
        super().step()
        took = time.perf_counter() - began
        ran, waited, driver_waited = (
            now - then for now, then in zip(self._clocks(), before, strict=True)
        )
        stood_still = max(0.0, took - ran - waited - driver_waited)
        self._steps.append((took, min(took, ran + stood_still)))

    def _clocks(self):
        """Seconds that the engine's thread ran and waited for a processor, and that the driver's thread waited."""
        threads = {thread.name: thread.native_id for thread in threading.enumerate()}
        driver = next((each for name, each in threads.items() if name.endswith("-pp0tp0")), None)
        clocks = []
        for task in (threading.get_native_id(), driver):
            if task is not None and task not in self._schedstats:
                path = f"/proc/self/task/{task}/schedstat"
                self._schedstats[task] = os.open(path, os.O_RDONLY)
            text = os.pread(self._schedstats[task], 99, 0) if task else b"0 0"
            clocks += [1e-9 * int(each) for each in text.split()[:2]]
        return clocks[0], clocks[1], clocks[3]

    def times_ms(self):
        """The steps' number, p99 and longest time, both less waits for a processor, and the longest collection."""
        kinds = [sorted(1e3 * step[kind] for step in self._steps) for kind in range(2)]
        p99 = len(self._steps) * 99 // 100
        figures = [each[at] for each in kinds for at in (p99, -1)]
        return len(self._steps), *figures, 1e3 * max(self._collections)

    def offer_all(self, names):
        """Compute all requests before any is requested. Returns their offers."""
        offers = []
        for number, name in enumerate(names):
            block = number % NUM_BLOCKS
            offers.append(self.scheduler.offer(name, blocks=[[block]], num_tokens=BLOCK_TOKENS))
            if number % STEP_REQUESTS == 0:
                self.step()
        return offers

    def want_all(self, names, offers):
        for number, (name, offer) in enumerate(zip(names, offers, strict=True)):
            self.scheduler.on_new_request(name, offer)
            if number % STEP_REQUESTS == 0:
                self.step()

    def serve_all(self, names, deadline_s):
        """Take steps until all blocks are freed. Returns the requests whose blocks are late."""
        until_s = time.monotonic() + deadline_s
        while not self.sent >= {*names} and time.monotonic() < until_s:
            self.step()
            self.workers[0].wait(0.01)
        return sorted({*names} - self.sent)


def main(count, *options):
    """Serve `count` requests that are in both engines' queues at once, and print the steps' times."""
    names, deadline_s = [f"r{number}" for number in range(int(count))], 300.0
    is_streamed = "--no-stream" not in options
    with ExitStack() as stack:
        p, d = [
            RemoteObject(
                "tests.hosts.long_queues:TimedEngine",
                name,
                role,
                "127.0.0.1",
                freezes="--no-freeze" not in options,
                stream=is_streamed,
            )
            for name, role in (("p", "producer"), ("d", "consumer"))
        ]
        for engine in (p, d):
            stack.callback(engine.release)
            stack.enter_context(closing(engine))
        place, secret = p.params(), new_secret()
        content = p.content()
        p.begin_timing()
        d.begin_timing()
        if is_streamed:
            d.ask(names, {"do_remote_prefill": True, "transfer_secret": secret, **place})
            p.ask(names, {"do_remote_decode": True, "transfer_secret": secret})
            d.run_for(1.0)
            p.begin("compute", names, deadline_s)
        else:
            d.want_all(names, p.offer_all(names))
            p.begin("serve_all", names, deadline_s)
        unloaded, wrong, failed = d.load_all(names, content, deadline_s)
        unsent = p.answer()
        refused = {*unloaded, *wrong, *failed, *unsent}
        lines = [f"{len(names) - len(refused)} served, {len(refused)} refused"]
        for name, engine in (("P", p), ("D", d)):
            steps, *times = engine.times_ms()
            figures = ", ".join(f"{each:.2f}" for each in times)
            lines.append(
                f"{name}: {steps} steps; p99, longest; less waits for a processor; collection: {figures} ms"
            )
        sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(*sys.argv[1:])
