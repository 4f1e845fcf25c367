"""Races between producers that get their blocks back and a slow consumer that reads them, many times in one process.

Real drivers and data paths run over UCX, in one thread with a fake clock: random draws decide what happens between two
turns, and no deadline takes real time. Every engine reuses its blocks in the first turn in which it may.
"""

import random
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import numpy as np

from kvconnector.errors import PeerLostError
from kvconnector.transport.ucx import open_ucx_transport
from tests.support.fakes import FakeCaches, FakeEngine, attention_model, dense_of
from tests.support.inproc_control import ControlFaults
from tests.support.world import Offer, World

MODEL = attention_model(num_layers=2, total_heads=2, head_dim=64)
BLOCK, LENGTHS = 16, (16, 32, 96)
"""A token has 1 KiB: reads have one chunk, as many as a window has, or three times as many."""
BLOCKS = list(range(LENGTHS[-1] // BLOCK))
OTHER_BLOCKS = [block + len(BLOCKS) for block in BLOCKS]
SETTINGS = {"staging": {"chunk_bytes": 16 * 1024, "budget_bytes": 80 * 1024, "window": 2}}
P_TIMEOUT_S, D_TIMEOUT_S, LEASE_S = 6.0, 60.0, 4.0
MAX_TURNS = 2000
MAX_ATTEMPTS = 10
TURNS_OF_A_READ = 6
SECONDS_PER_TURN = 0.2


class StaleBytesError(AssertionError):
    """A load succeeded with bytes that its producer did not hold for it, or it wrote outside its blocks."""


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that `p` computes while it is read, in a turn with probability `pace`. `granted` are its final bytes."""

    name: str
    offer: Offer
    block_ids: list[int]
    pace: float
    num_written: int = 0
    is_over: bool = False
    granted: dict | None = None


class Races:
    """A producer `p`, a consumer `d` that reads slowly, and a second consumer `e` that reads after it.

    `seen` counts the outcomes of `d`'s loads by cause, and `paths` the paths of all loads. With `is_streamed`, `d`
    follows prompts that `p` computes. The engine that `too_early` names, "p" or "d", overwrites its blocks as soon as
    it wants them back, without waiting for the connector. `slow_down` delays a worker's copies on a GPU.
    """

    def __init__(
        self,
        *,
        seed=0,
        is_streamed=False,
        too_early="",
        make_caches=FakeCaches,
        slow_down=lambda worker: None,
        **settings,
    ):
        self.random = random.Random(seed)
        self.seen = Counter()
        self.paths = Counter()
        self._is_streamed = is_streamed
        self._prompt = None
        self._too_early = too_early
        self._slow_down = slow_down
        # messages of 1 KiB and more use rendezvous: they stay at the sender until they are received
        ucx = partial(open_ucx_transport, options={"RNDV_THRESH": "1k"})
        self.world = World(
            seed=seed,
            settings={**SETTINGS, **settings},
            network=SimpleNamespace(transport=ucx),
            make_caches=make_caches,
        )
        self.p = self._start("p", "producer", P_TIMEOUT_S)
        # UCX loses no message, so `d` stays on the control channel
        on_hub = {"insecure": True, "over_ucx": False}
        self.d = self._start("d", "consumer", D_TIMEOUT_S, control=on_hub)
        self.e = self._start("e", "consumer", D_TIMEOUT_S)
        self._pace = {}
        self._ended = {}
        self._held = {}
        self._names = (f"r{number}" for number in count(1))
        self.read_by(self.e)

    def close(self):
        self.world.close()

    def _start(self, name, role, timeout_s, **settings):
        num_blocks = 2 * len(BLOCKS)
        shape = FakeEngine(name, MODEL, block_sizes=(BLOCK,), num_blocks=(num_blocks,))
        peer = {"timeout_s": timeout_s, "heartbeat_interval_s": 1.0, "transfer_timeout_s": 120.0}
        lease = {"duration_s": LEASE_S}
        return self.world.start(shape, role=role, peer=peer, lease=lease, **settings)

    def run(self, count, *causes):
        """Run `count` races, each cause in turn, by default all of them."""
        causes = causes or (*CAUSES, *(STREAM_CAUSES if self._is_streamed else ()))
        is_met = False
        for number in range(count):
            if not is_met:
                self.read_by(self.d)
            cause = causes[number % len(causes)]
            self._run(cause)
            is_met = "given up" not in cause

    def _run(self, cause):
        num_tokens, pace = self.random.choice(LENGTHS), self.random.choice([1.0, 0.5, 0.2])
        ids = self.random.sample(BLOCKS, num_tokens // BLOCK)
        self._pace = {self.d: pace}
        if self._is_streamed:
            name, offer, granted = self._compute(ids)
        else:
            name, offer, granted = self._offer(ids)
        self._load(self.d, name, offer, BLOCKS, range(num_tokens))
        self._slow_down(self.random.choice([self.p, self.d]).workers[0])
        num_turns = TURNS_OF_A_READ / pace
        if self._prompt is not None:
            num_turns += (len(ids) + 1) / self._prompt.pace
        self._turn(self.random.randrange(int(num_turns)))
        before = None
        if self._too_early == "p":
            self.p.workers[0].caches.scribble(0, ids)
        elif self._too_early == "d":
            before = self._reuse()
            self._turn(3)
        (CAUSES | STREAM_CAUSES)[cause](self, name, offer)
        outcome = self._outcome(name)
        if before is None and outcome == "read":
            if self._prompt is not None:
                granted = self._prompt.granted
            if granted is None:
                raise StaleBytesError(f"{cause}: {name} was over before its prompt")
            _check_same(_dense(self.d, BLOCKS, num_tokens), granted, f"{cause}: {name} is stale")
        before = before or self._reuse()
        self._pace.clear()
        self._until(self._is_quiet)
        self._ended.clear()
        late = f"{cause}: bytes came after {name} was over"
        _check_same(_dense(self.d, BLOCKS, LENGTHS[-1]), before, late)
        self.seen[f"{cause}: {outcome}"] += 1

    def _reuse(self):
        """Give `d`'s blocks to a new owner. Returns the bytes that the owner writes, which must not change."""
        self.d.workers[0].caches.scribble(0, BLOCKS)
        return _dense(self.d, BLOCKS, LENGTHS[-1])

    def _offer(self, block_ids):
        """Hold a request with new bytes at the producer. Returns its name, its offer and the bytes."""
        name, num_tokens = next(self._names), len(block_ids) * BLOCK
        self.p.workers[0].caches.scribble(0, block_ids)
        self._held[name] = block_ids
        granted = _dense(self.p, block_ids, num_tokens)
        return name, self.p.grant(name, [block_ids], num_tokens), granted

    def _compute(self, block_ids):
        """Start a prompt at `p`. Returns its name and offer."""
        name = next(self._names)
        offer = self.p.grant(name, [()], 0, is_complete=False)
        offer = replace(offer, blocks=(), num_tokens=len(block_ids) * BLOCK)
        self._prompt = Prompt(name, offer, block_ids, self.random.choice([1.0, 0.5, 0.2]))
        return name, offer, None

    def _step(self, prompt):
        """Compute the next block of a prompt, or report that it is complete."""
        ids = prompt.block_ids
        prompt.is_over = prompt.num_written == len(ids)
        num_tokens = prompt.num_written * BLOCK
        if not prompt.is_over:
            self.p.workers[0].caches.scribble(0, [ids[prompt.num_written]])
            prompt.num_written += 1
            num_tokens += self.random.choice([7, BLOCK])
        self._report(prompt, num_tokens)

    def _report(self, prompt, num_tokens):
        """Let consumers read the first tokens of a prompt; hold a complete prompt for them."""
        ids = prompt.block_ids[: prompt.num_written]
        if prompt.is_over:
            self._held[prompt.name] = ids
            prompt.granted = _dense(self.p, ids, num_tokens)
        how = {"grown_from": prompt.offer, "is_complete": prompt.is_over}
        self.p.grant(prompt.name, [ids], num_tokens, **how)

    def abort(self, name):
        """Let `p` withdraw a request. It gets the blocks of an unfinished prompt back at once."""
        self.p.withdraw(name)
        prompt = self._prompt
        if prompt is not None and prompt.name == name and not prompt.is_over:
            prompt.is_over = True
            self.p.workers[0].caches.scribble(0, prompt.block_ids)

    def preempt(self, name, *, is_reported=True):
        """Let `p` take a prompt's blocks and compute it again in others; if `is_reported`, it aborts it first."""
        prompt = self._prompt
        was_over, count = prompt.is_over, len(prompt.block_ids)
        if is_reported or was_over:
            self.abort(name)
        if was_over:
            return
        self.p.workers[0].caches.scribble(0, prompt.block_ids)
        prompt.block_ids, prompt.num_written, prompt.is_over = OTHER_BLOCKS[:count], count, True
        self._turn(self.random.randrange(3) if is_reported else 0)
        self.p.workers[0].caches.scribble(0, prompt.block_ids)
        self._report(prompt, count * BLOCK)

    def _load(self, engine, name, offer, blocks, tokens):
        engine.want(name, offer, is_followed=not offer.blocks)
        engine.load(name, offer, [blocks], [tokens])

    def _outcome(self, name):
        """Return the outcome of a load: "read", or the error's name."""
        self._until(lambda: name in self._ended)
        return self._ended.pop(name)

    def read_by(self, engine):
        """Let a consumer read other blocks, reconnecting if it must. All bytes must be right."""
        outcome = ""
        for _ in range(MAX_ATTEMPTS):
            if outcome == "read":
                break
            name, offer, granted = self._offer(OTHER_BLOCKS)
            self._load(engine, name, offer, BLOCKS, range(LENGTHS[-1]))
            outcome = self._outcome(name)
            self._take_back(name)
        assert outcome == "read", outcome
        found = _dense(engine, BLOCKS, LENGTHS[-1])
        _check_same(found, granted, f"{name} of {engine.shape.engine_id} is stale")

    def cut_off_other(self):
        """Break the link to `e` while chunks are in flight, so that other memory replaces their slots."""
        name, offer, _ = self._offer(OTHER_BLOCKS)
        self._load(self.e, name, offer, BLOCKS, range(LENGTHS[-1]))
        self._turn(2)
        self.world.freeze(self.e)
        self._turn(2)
        self.world.sever(self.p, self.e)
        self._turn(2)
        self.world.freeze(self.e, frozen=False)
        self._outcome(name)
        self._take_back(name)

    def _take_back(self, name):
        self.p.withdraw(name)
        self._until(lambda: name not in self._held)

    def confirm(self, name, offer):
        """Let another consumer read the request's last token, and confirm it."""
        tokens = range(offer.num_tokens - 1, offer.num_tokens)
        self._load(self.e, f"{name}-again", offer, OTHER_BLOCKS, tokens)

    @contextmanager
    def stopped(self):
        """Within this context `d` takes no turns."""
        self.world.freeze(self.d)
        yield
        self.world.freeze(self.d, frozen=False)

    @contextmanager
    def losing_messages(self):
        """Within this context all messages to and from `d` are lost."""
        (worker,) = self.d.workers
        self.world.hub.faults = ControlFaults(drop_probability=1.0, only=worker.control.address)
        yield
        self.world.hub.faults = ControlFaults()

    def pass_time(self, seconds):
        """Let time pass for the engines that take turns."""
        for _ in range(round(seconds)):
            self.world.clock.advance(1.0)
            self._turn()

    def lose(self):
        """Let the producer drop the link to `d` without a message."""
        driver, channel = self.p.workers[0].driver, self.d.workers[0].control
        with self.losing_messages():
            handles = {end.other.handle for end in channel.ends() if end.other}
            for link in driver.links:
                if driver.links._connections[link].handle in handles:
                    driver.links.lose(link, PeerLostError("a race"))
            self._turn(2)

    def _turn(self, count=1):
        engines = [self.p, self.d, self.e]
        for _ in range(count):
            self.random.shuffle(engines)
            for engine in engines:
                if not engine.is_frozen and self.random.random() < self._pace.get(engine, 1.0):
                    engine.responder.turn(0.0)
                    engine.workers[0].driver.turn(0.0)
                    self._poll(engine.workers[0])
            prompt = self._prompt
            if prompt is not None and not prompt.is_over and self.random.random() < prompt.pace:
                self._step(prompt)

    def _poll(self, worker):
        output = worker.poll()
        self.paths.update(transfer.path for transfer in output.stats.transfers)
        for name in output.finished_sending:
            worker.caches.scribble(0, self._held.pop(name))
        for name in output.finished_recving:
            failed = output.failed_recving.get(name)
            self._ended[name] = "read" if failed is None else failed.partition(":")[0]

    def _is_quiet(self):
        is_computed = self._prompt is None or self._prompt.is_over
        return is_computed and not self._held and self.world.is_quiet()

    def _until(self, condition):
        for _ in range(MAX_TURNS):
            if condition():
                return
            self._turn()
            self.world.clock.advance(SECONDS_PER_TURN)
        raise AssertionError(f"no end: ended {self._ended}, held {self._held}")


def _dense(engine, block_ids, num_tokens):
    return dense_of([engine.workers[0].caches], [block_ids], num_tokens)


def _check_same(found, expected, what):
    if not all(np.array_equal(found[key], expected[key]) for key in expected):
        raise StaleBytesError(what)


def _expired(races, name, offer):
    with races.stopped():
        races.pass_time(LEASE_S + 1.0)


def _paused(races, name, offer):
    """Pause `d` for the producer's timeout, and as long again, after which the producer reuses the slots."""
    with races.stopped():
        with races.losing_messages():
            races.pass_time(2 * (P_TIMEOUT_S + 1.0))
        races.cut_off_other()
        races.read_by(races.e)


def _lost(races, name, offer):
    with races.stopped():
        races.lose()
        races.read_by(races.e)


CAUSES: dict[str, Callable[[Races, str, Offer], None]] = {
    "confirmed": Races.confirm,
    "expired": _expired,
    "aborted by the producer": lambda races, name, offer: races.abort(name),
    "aborted by the consumer": lambda races, name, offer: races.d.drop(name),
    "given up by timeout": _paused,
    "given up silently": _lost,
}
STREAM_CAUSES: dict[str, Callable[[Races, str, Offer], None]] = {
    "preempted": lambda races, name, offer: races.preempt(name),
    "moved to other blocks": lambda races, name, offer: races.preempt(name, is_reported=False),
}
"""Causes that exist only for prompts that are computed while they are read."""
