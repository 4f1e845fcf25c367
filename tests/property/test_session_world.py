"""Two producers and a consumer over bad links, with engines that die, freeze and restart."""

from itertools import count

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvconnector.ids import new_secret
from kvconnector.runtime import step_layers
from kvconnector.session import load
from tests.property.deployments import (
    LONG_IDLE_S,
    Held,
    Wanted,
    are_apart,
    longest_wait_s,
    settings_of_an_engine,
)
from tests.support.examples import examples
from tests.support.fakes import LAYOUTS, FakeEngine, attention_model, dense_of
from tests.support.inproc_control import ControlFaults
from tests.support.loopback import LoopbackFaults
from tests.support.world import Offer, World

MODEL = attention_model(num_layers=3, total_heads=2, head_dim=2)
NUM_BLOCKS = 24


def shapes_of(name):
    return st.builds(
        FakeEngine,
        engine_id=st.just(name),
        model=st.just(MODEL),
        tp_size=st.integers(1, 2),
        pp_size=st.integers(1, 2),
        block_sizes=st.tuples(st.sampled_from([2, 3, 4])),
        num_blocks=st.just((NUM_BLOCKS,)),
        layout=st.sampled_from(LAYOUTS),
    )


class Deployment(RuleBasedStateMachine):
    """Two producers and one consumer, with the records that their engines would keep."""

    @initialize(
        seed=st.integers(0, 2**16),
        shapes=st.tuples(*map(shapes_of, ("p0", "p1", "d"))),
        differing=st.tuples(*[settings_of_an_engine()] * 3),
    )
    def start(self, seed, shapes, differing):
        self.patch = pytest.MonkeyPatch()
        for module in (step_layers, load):
            self.patch.setattr(module, "MIN_PIECE_BYTES", 1)
        self.world = World(seed=seed)
        self.shapes = shapes
        self.roles = ("producer", "producer", "both")
        self.settings = differing
        self.engines = [None] * 3
        self.free = [[]] * 3
        self.shadows = {}
        self.held = []
        self.wanted = []
        self.numbers = count(1)
        for index in range(3):
            self._start(index)

    def teardown(self):
        if not hasattr(self, "world") or None in self.engines:
            return  # it did not start
        try:
            self._settle()
        finally:
            self.patch.undo()
            self.world.close()

    @rule(
        producer=st.integers(0, 1),
        num_tokens=st.integers(1, 14),
        skip=st.integers(0, 5),
        pause=st.integers(0, 3),
    )
    def request(self, producer, num_tokens, skip, pause):
        """Hold, want and load a request, with a few turns in between."""
        held = self._hold(producer, num_tokens, is_computed=True)
        if held is not None:
            self.turns(pause)
            wanted = self._want(held)
            self.turns(pause)
            self._load(wanted, skip)

    @rule(producer=st.integers(0, 1), num_tokens=st.integers(1, 14), early=st.booleans())
    def queue(self, producer, num_tokens, early):
        """Hold a request, and perhaps queue it at the consumer."""
        held = self._hold(producer, num_tokens, is_computed=True)
        if held is not None and early:
            self._want(held)

    @rule(
        producer=st.integers(0, 1),
        num_tokens=st.integers(1, 14),
        steps=st.lists(st.integers(1, 6), max_size=6),
        skip=st.integers(0, 5),
        pause=st.integers(0, 8),
    )
    def stream(self, producer, num_tokens, steps, skip, pause):
        """Queue a request at both engines at once; some steps compute it, reported by layers or at their end."""
        held = self._hold(producer, num_tokens, is_computed=False)
        if held is None:
            return
        held.report()
        wanted = self._want(held, is_followed=True)
        num_layers = [0 if step % 2 else MODEL.num_layers for step in steps]
        for step, left in [
            (s, n - i) for s, n in zip(steps, num_layers, strict=True) for i in range(n + 1)
        ]:
            self.turns(pause)
            if held in self.held and not held.is_complete:
                (held.compute_layer if left else held.step)(step)
            if wanted in self.wanted and wanted.producer_started and not wanted.block_ids:
                self._load(wanted, skip)

    @rule(pick=st.integers(0, 99), num_tokens=st.integers(1, 9), pause=st.integers(0, 3))
    def a_layer_is_computed(self, pick, num_tokens, pause):
        computing = [held for held in self.held if not (held.is_complete or held.is_void)]
        if computing:
            computing[pick % len(computing)].compute_layer(num_tokens)
            self.turns(pause)

    @rule(pick=st.integers(0, 99), num_tokens=st.integers(1, 9), pause=st.integers(0, 3))
    def a_step_computes(self, pick, num_tokens, pause):
        """Take a step of a prompt; with the last one the engine holds the blocks, even if no consumer wants them."""
        computing = [held for held in self.held if not held.is_complete]
        if computing:
            held = computing[pick % len(computing)]
            held.step(num_tokens if num_tokens < 9 else held.num_tokens)
            self.turns(pause)

    @rule(pick=st.integers(0, 99))
    def preempt(self, pick):
        """Let another request write at once to an unfinished prompt's blocks; the prompt continues elsewhere."""
        computing = [held for held in self.held if not (held.is_complete or held.is_void)]
        if computing:
            held = computing[pick % len(computing)]
            held.is_void, held.step_stop, held.num_layers = True, 0, 0
            self._take_back(held)

    def _take_back(self, held):
        held.engine.withdraw(held.name)
        for worker in held.engine.workers if not held.is_complete else ():
            worker.caches.scribble(0, held.block_ids)

    @rule(pick=st.integers(0, 99), skip=st.integers(0, 5))
    def load_queued(self, pick, skip):
        idle = [
            wanted
            for wanted in self.wanted
            if not wanted.block_ids and (wanted.producer_started or not wanted.is_followed)
        ]
        if idle:
            self._load(idle[pick % len(idle)], skip)

    def _hold(self, producer, num_tokens, *, is_computed):
        """Hold a request at a producer, computed or to be computed. Returns None if too few blocks are free."""
        engine, shape = self.engines[producer], self.shapes[producer]
        needed = -(-num_tokens // shape.block_sizes[0])
        if len(self.free[producer]) < needed:
            return None
        ids = [self.free[producer].pop() for _ in range(needed)]
        name = f"r{next(self.numbers)}"
        caches = [worker.caches for worker in engine.workers]
        dense = dense_of(caches, [ids], num_tokens)
        if is_computed:
            offer = engine.grant(name, [ids], num_tokens)
        else:
            offer = Offer(shape.engine_id, engine.directory.address, name, new_secret(), (), 0)
            for each in caches:
                each.scribble(0, ids)
        held = Held(engine, name, ids, num_tokens, offer, dense, set(engine.workers))
        held.num_computed = num_tokens if is_computed else 0
        self.held.append(held)
        return held

    def _want(self, held, *, is_followed=False):
        self.engines[2].want(name := f"w{next(self.numbers)}", held.offer, is_followed=is_followed)
        self.wanted.append(Wanted(self.engines[2], name, held, is_followed=is_followed))
        return self.wanted[-1]

    def _load(self, wanted, skip):
        num_tokens = wanted.held.num_tokens
        needed = -(-num_tokens // self.shapes[2].block_sizes[0])
        if len(self.free[2]) < needed:
            return
        wanted.block_ids = [self.free[2].pop() for _ in range(needed)]
        wanted.tokens = range(min(skip, num_tokens), num_tokens)
        wanted.waiting = set(self.engines[2].workers)
        for worker in self.engines[2].workers:
            worker.caches.scribble(0, wanted.block_ids)
            self._remember(worker, wanted.block_ids)
        ids = [wanted.block_ids]
        self.engines[2].load(wanted.name, wanted.held.offer, ids, [wanted.tokens])

    @rule(pick=st.integers(0, 99))
    def drop(self, pick):
        if self.wanted:
            wanted = self.wanted[pick % len(self.wanted)]
            self.engines[2].drop(wanted.name)
            if not wanted.block_ids:
                self.wanted.remove(wanted)

    @rule(pick=st.integers(0, 99))
    def withdraw(self, pick):
        if self.held:
            held = self.held[pick % len(self.held)]
            self._take_back(held)
            if not held.is_complete:  # the engine has its blocks back at once
                self._free(held)

    @rule(num_turns=st.integers(1, 20))
    def turns(self, num_turns):
        for _ in range(num_turns):
            self._turn()

    @rule(seconds=st.sampled_from([0.3, 2.0, 6.0, 16.0, 31.0]))
    def time_passes(self, seconds):
        self.world.clock.advance(seconds)
        self._turn()

    @rule(
        drop=st.sampled_from([0.0, 0.0, 0.05, 0.2]),
        delay=st.integers(0, 4),
        lose=st.sampled_from([0.0, 0.0, 0.05, 0.2]),
        late=st.integers(0, 4),
        twice=st.sampled_from([0.0, 0.2, 1.0]),
    )
    def links_change(self, drop, delay, lose, late, twice):
        self.world.hub.faults = ControlFaults(
            drop_probability=drop, duplicate_probability=twice, max_delay_polls=delay
        )
        self.world.network.faults = LoopbackFaults(max_delay_calls=late, drop_probability=lose)

    @rule(
        fault=st.sampled_from(["sever", "kill", "power cut", "freeze", "freeze"]),
        index=st.integers(0, 2),
    )
    def fault(self, fault, index):
        engine = self.engines[index]
        if fault == "sever":
            self.world.sever(self.engines[index % 2], self.engines[2])
        elif fault == "freeze":
            self.world.freeze(engine)
        else:
            self.world.kill(engine, silently=fault == "power cut")
            self.held = [held for held in self.held if held.engine is not engine]
            self.wanted = [wanted for wanted in self.wanted if wanted.engine is not engine]
            self._start(index)

    @precondition(lambda self: any(engine.is_frozen for engine in self.engines))
    @rule()
    def thaw(self):
        for engine in self.engines:
            self.world.freeze(engine, frozen=False)

    def _start(self, index):
        self.engines[index] = self.world.start(
            self.shapes[index], role=self.roles[index], **self.settings[index]
        )
        self.free[index] = list(range(NUM_BLOCKS))
        for worker in self.engines[index].workers:
            self._remember(worker, range(NUM_BLOCKS))

    def _remember(self, worker, block_ids):
        """Remember that these blocks must stay as they are now."""
        shadow = self.shadows.setdefault(
            worker, {key: array.copy() for key, array in worker.caches.arrays.items()}
        )
        for key, array in worker.caches.arrays.items():
            shadow[key][list(block_ids)] = array[list(block_ids)]

    def _turn(self):
        self.world.turn()
        for engine in self.engines:
            for worker in engine.workers:
                output = worker.poll()
                for wanted in self.wanted:
                    wanted.producer_started |= wanted.name in output.producer_started
                for name in output.finished_sending:
                    self._released(worker, name)
                for name in output.finished_recving:
                    self._loaded(worker, name, name in output.failed_recving)
                assert set(output.failed_recving) <= output.finished_recving
        for worker in self.engines[2].workers:
            self._check_untouched(worker)

    def _released(self, worker, name):
        held = next(held for held in self.held if held.name == name)
        assert worker in held.waiting, "released twice"
        held.waiting.remove(worker)
        worker.caches.scribble(0, held.block_ids)
        if not held.waiting:
            self._free(held)

    def _free(self, held):
        self.held.remove(held)
        self.free[self.engines.index(held.engine)] += held.block_ids

    def _loaded(self, worker, name, is_failed):
        wanted = next(wanted for wanted in self.wanted if wanted.name == name)
        assert worker in wanted.waiting, "finished twice"
        wanted.waiting.remove(worker)
        wanted.is_failed |= is_failed
        if not is_failed:
            self._check_loaded(worker, wanted)
        self._remember(worker, wanted.block_ids)
        if not wanted.waiting:
            self.wanted.remove(wanted)
            self.free[2] += wanted.block_ids

    def _check_loaded(self, worker, wanted):
        """Check that the loaded tokens have the producer's bytes, and all others their own."""
        size = self.shapes[2].block_sizes[0]
        for (group, layer, part), array in worker.caches.arrays.items():
            heads = worker.caches.rank.groups[group].parts[part]
            expected = self.shadows[worker][group, layer, part][wanted.block_ids].copy()
            for token in wanted.tokens:
                dense = wanted.held.dense[group, layer, part]
                expected[token // size, :, token % size] = dense[
                    heads.head_start : heads.head_stop, token
                ]
            assert np.array_equal(array[wanted.block_ids], expected)

    def _check_untouched(self, worker):
        """Check that blocks that this rank is not loading are unchanged."""
        loading = {
            block
            for wanted in self.wanted
            if worker in wanted.waiting
            for block in wanted.block_ids
        }
        rest = [block for block in range(NUM_BLOCKS) if block not in loading]
        for key, array in worker.caches.arrays.items():
            assert np.array_equal(array[rest], self.shadows[worker][key][rest])

    def _all_ends(self, seconds_per_turn=1.0):
        deadline = self.world.clock() + longest_wait_s(self.settings)
        while not (self.world.is_quiet() and not self.held and not self.wanted):
            assert self.world.clock() < deadline, (self.held, self.wanted)
            self._turn()
            self.world.clock.advance(seconds_per_turn)

    def _serves(self, producer):
        """Check that requests are served, whatever failed before. One may still fail because of a message that was lost
        then.
        """
        deadline = self.world.clock() + longest_wait_s(self.settings)
        is_served = False
        while not is_served:
            assert self.world.clock() < deadline
            wanted = self._want(self._hold(producer, 14, is_computed=True))
            self._load(wanted, 0)
            self._all_ends(0.1)
            is_served = not wanted.is_failed

    def _settle(self):
        """Check that with working links everything ends within its deadlines, and no record is left."""
        self.world.hub.faults = ControlFaults()
        self.world.network.faults = LoopbackFaults()
        self.thaw()
        for held in [held for held in self.held if not held.is_complete]:
            while not held.is_complete:  # first the step under way
                held.step(held.num_tokens)
        deadline = self.world.clock() + longest_wait_s(self.settings)
        while any(wanted.is_followed and not wanted.producer_started for wanted in self.wanted):
            assert self.world.clock() < deadline, self.wanted
            self._turn()
            self.world.clock.advance(1.0)
        for wanted in [wanted for wanted in self.wanted if not wanted.block_ids]:
            self.engines[2].drop(wanted.name)
            self.wanted.remove(wanted)
        self._all_ends()
        for producer in (0, 1):
            self._serves(producer)
        if self.settings[2]["peer"]["idle_timeout_s"] < LONG_IDLE_S:
            assert self.world.run(lambda: are_apart(self.engines), seconds_per_turn=1.0)
        for engine in self.engines:
            for worker in engine.workers:
                assert worker.driver.links.refusals.counts["LocalProtocolError"] == 0


def _part(number):
    """A test of a third of the examples, which differ: all of them take a busy machine minutes."""
    case = type(f"Deployment{number}", (Deployment,), {}).TestCase
    case.settings = examples(20, stateful_step_count=40)
    return case


TestDeployment1, TestDeployment2, TestDeployment3 = map(_part, (1, 2, 3))
