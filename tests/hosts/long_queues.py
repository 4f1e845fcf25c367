"""An engine on a host with very many requests in its queue.

As a program, `python -m tests.hosts.long_queues 10000` serves that many streamed requests between two engines on this
host and prints what their steps took: by that the rules are kept by which the driver's thread leaves the GIL to others.
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
        """Load each request once the producer has started it. Returns those not loaded, loaded wrongly, and failed."""
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
    """Times what a step takes of the connector: `build_step`, `start_step`, `poll` and `update`.

    On few cores a part of a long step is waiting for a processor: the engine's thread for one, or the driver's while
    the engine's waits for the GIL that it has. What is left is what the connector delays a step by.
    """

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self._steps, self._schedstats = [], {}

    def begin_timing(self):
        gc.collect()
        gc.freeze()  # as vLLM does once it has started
        self._steps.clear()

    def step(self):
        before, began_s = self._clocks_s(), time.perf_counter()
        super().step()
        took_s = time.perf_counter() - began_s
        ran_s, *waited_s = (now - then for now, then in zip(self._clocks_s(), before, strict=True))
        self._steps.append((took_s, max(ran_s, took_s - sum(waited_s))))

    def _clocks_s(self):
        """Return for how long the engine's thread has run, and it and the driver's have waited for a processor."""
        driver = [each for each in threading.enumerate() if each.name.startswith("kvconnector-")]
        clocks_s = []
        for thread in (threading.current_thread(), *driver[:1]):
            task = thread.native_id
            if task not in self._schedstats:
                self._schedstats[task] = os.open(f"/proc/self/task/{task}/schedstat", os.O_RDONLY)
            times_ns = os.pread(self._schedstats[task], 99, 0).split()[:2]
            clocks_s += [1e-9 * int(each) for each in times_ns]
        return clocks_s[0], clocks_s[1], clocks_s[3] if driver else 0.0

    def times_ms(self):
        """Return the number of steps, their p99 and the longest, and both less the waits for a processor."""
        kinds = [sorted(1e3 * step[kind] for step in self._steps) for kind in range(2)]
        p99 = len(self._steps) * 99 // 100
        return len(self._steps), *(each[at] for each in kinds for at in (p99, -1))


def main(count):
    """Serve `count` requests that are in the queues of both engines at once, and print the steps' times."""
    names, deadline_s = [f"r{number}" for number in range(int(count))], 300.0
    with ExitStack() as stack:
        engines = []
        for name, role in (("p", "producer"), ("d", "consumer")):
            maker = "tests.hosts.long_queues:TimedEngine"
            engine = RemoteObject(maker, name, role, "127.0.0.1")
            stack.callback(engine.release)
            engines.append(stack.enter_context(closing(engine)))
        p, d = engines
        place, secret = p.params(), new_secret()
        content = p.content()
        for engine in engines:
            engine.begin_timing()
        d.ask(names, {"do_remote_prefill": True, "transfer_secret": secret, **place})
        p.ask(names, {"do_remote_decode": True, "transfer_secret": secret})
        d.run_for(1.0)
        p.begin("compute", names, deadline_s)
        unloaded, wrong, failed = d.load_all(names, content, deadline_s)
        refused = {*unloaded, *wrong, *failed, *p.answer()}
        lines = [f"{len(names) - len(refused)} served, {len(refused)} refused"]
        for name, engine in zip(("producer", "consumer"), engines, strict=True):
            steps, p99, longest, own_p99, own_longest = engine.times_ms()
            lines.append(
                f"{name}: {steps} steps, p99 {p99:.2f}, longest {longest:.2f} ms;"
                f" less waits for a processor {own_p99:.2f}, {own_longest:.2f} ms"
            )
        sys.stdout.write("\n".join([*lines, ""]))


if __name__ == "__main__":
    main(*sys.argv[1:])
