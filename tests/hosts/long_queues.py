"""An engine on a host with very many requests in its queue."""

import time

import numpy as np

from tests.integration.runtime_pair import Engine

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
