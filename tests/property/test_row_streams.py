"""A prompt with groups of compressed rows, windows, chunks and states: D reads what P wrote, streamed or at its end."""

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.ids import EngineAddress
from kvconnector.planning import KeepsAll, KeepsChunk, KeepsState, KeepsWindow
from kvconnector.runtime.offers import Offers
from kvconnector.runtime.params import StreamRequest, TransferParams
from kvconnector.runtime.remote_request import RemoteRequest
from kvconnector.session.orders import WantRequest
from tests.support.fakes import FakeEngine, FakeGroup, FakeModel, FakePart, metadata_of
from tests.support.world import World

NUM_BLOCKS = 300
SECRET = "5" * 32


@dataclass
class Case:
    """A prompt of `num_tokens` tokens, of which the consumer has `num_cached`; the producer computes it up to each of
    `steps`. `retentions[group]` says what either keeps.
    """

    producer: FakeEngine
    consumer: FakeEngine
    retentions: tuple
    num_tokens: int
    num_cached: int
    steps: list
    is_streamed: bool
    seed: int

    def row_tokens(self, group):
        return self.producer.model.groups[group].row_tokens

    def rows(self, group, num_tokens):
        """Return the rows of a group that exist once `num_tokens` tokens do."""
        if isinstance(self.retentions[group], KeepsState):
            return range(max(0, num_tokens - 1), num_tokens)
        return range(num_tokens // self.row_tokens(group))


@st.composite
def engines(draw, name, model, retentions):
    sizes = [1 if isinstance(kept, KeepsState) else draw(st.integers(1, 6)) for kept in retentions]
    return FakeEngine(
        name,
        model,
        tp_size=draw(st.integers(1, 3)),
        pp_size=draw(st.integers(1, 2)),
        block_sizes=tuple(sizes),
        num_blocks=(NUM_BLOCKS,) * len(model.groups),
    )


@st.composite
def cases(draw):
    extents = st.integers(1, 9)
    others = st.one_of(
        st.sampled_from([KeepsAll(1), KeepsAll(4), KeepsAll(128), KeepsState()]),
        st.builds(KeepsWindow, extents),
        st.builds(KeepsChunk, extents),
    )
    first = KeepsAll(draw(st.sampled_from([1, 4, 128])))
    retentions = (first, *draw(st.lists(others, max_size=3)))
    groups = []
    for kept in retentions:
        layers = tuple(sorted(draw(st.sets(st.integers(0, 2), min_size=1))))
        part = FakePart("latent", 1, draw(st.integers(1, 3)), 2)
        m = kept.row_tokens if isinstance(kept, KeepsAll) else 1
        groups.append(FakeGroup(layers, (part,), m))
    model = FakeModel(3, tuple(groups))
    num_tokens = draw(st.sampled_from([0, 0, 120, 250])) + draw(st.integers(1, 20))
    return Case(
        producer=draw(engines("p", model, retentions)),
        consumer=draw(engines("d", model, retentions)),
        retentions=retentions,
        num_tokens=num_tokens,
        num_cached=draw(st.integers(0, num_tokens - 1)),
        steps=sorted({num_tokens, *draw(st.sets(st.integers(1, num_tokens), max_size=4))}),
        is_streamed=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


class Request:
    """The prompt on one engine: its blocks, which begin with the first row, or hold one state."""

    def __init__(self, case, engine, rng):
        self.case, self.engine = case, engine
        self.blocks = []
        for group, size in enumerate(engine.shape.block_sizes):
            rows = case.rows(group, case.num_tokens)
            self.blocks.append(rng.permutation(NUM_BLOCKS)[: -(-len(rows) // size)].tolist())

    @property
    def first_blocks(self):
        is_state = [isinstance(kept, KeepsState) for kept in self.case.retentions]
        return [self.case.num_tokens - 1 if each else 0 for each in is_state]

    def slots(self, group, rows):
        """Return where the arrays of a group have these rows."""
        size = self.engine.shape.block_sizes[group]
        if isinstance(self.case.retentions[group], KeepsState):
            return self.blocks[group], 0, [0]
        return [self.blocks[group][row // size] for row in rows], 0, [row % size for row in rows]

    def write(self, data, num_tokens):
        """Compute the prompt up to here. Rows that do not exist yet keep what an earlier request left."""
        for worker in self.engine.workers:
            for (group, layer, _), array in worker.caches.arrays.items():
                rows = self.case.rows(group, num_tokens)
                if len(rows):
                    array[self.slots(group, rows)] = data[group, layer][list(rows)]


def _transfer(world, case, p, d, data):
    """Compute the prompt at P, step by step, and load it into D."""
    geometry = case.producer.geometry()
    offers = Offers(geometry, case.retentions, metadata_of(case.producer, "producer"))
    orders = [offers.open("r", StreamRequest(transfer_id="t", transfer_secret=SECRET))]
    for order in orders if case.is_streamed else ():
        p.engine._order(order)

    def want(hold=None):
        params = TransferParams(
            remote_engine_id="p",
            remote_request_id="t" if hold is None else hold.transfer_id,
            remote_block_ids=() if hold is None else tuple(map(tuple, p.blocks)),
            remote_first_blocks=() if hold is None else tuple(p.first_blocks),
            remote_host="::1",
            remote_port=1,
            remote_num_tokens=case.num_tokens,
            transfer_secret=SECRET if hold is None else hold.secret,
        )
        remote = RemoteRequest(params, case.retentions, num_computed_tokens=case.num_cached)
        place = EngineAddress("p", p.engine.directory.address)
        names = params.remote_request_id, params.transfer_secret
        d.engine._order(WantRequest("w", *names, place, hold is None))
        d.engine._order(
            remote.load_order(
                "w",
                blocks=d.blocks,
                first_blocks=None,
                num_tokens=case.num_tokens - case.num_cached,
                num_encoder_tokens=0,
                computed_tokens=None,
            )
        )

    if case.is_streamed:
        want()
    for step in case.steps:
        p.write(data, step)
        if case.is_streamed:
            for order in offers.grow("r", p.blocks, step, 0):
                p.engine._order(order)
            for _ in range(world.random.randrange(60)):
                world.turn()
    hold = offers.hold(
        "r",
        blocks=p.blocks,
        first_blocks=p.first_blocks,
        num_tokens=case.num_tokens,
        num_encoder_tokens=0,
        lease_duration_s=0.0,
        extra=b"",
    )
    p.engine._order(hold)
    if not case.is_streamed:
        want(hold)
    assert world.run(world.is_quiet)
    for worker in d.engine.workers:
        output = worker.poll()
        assert (output.finished_recving, output.failed_recving) == ({"w"}, {})


@given(cases())
def test_rows_are_read_once_they_exist_and_nothing_else_is_written(case):
    rng = np.random.default_rng(case.seed)
    world = World(seed=case.seed, settings={"staging": {"budget_bytes": 64 * 1024}})
    try:
        p = Request(case, world.start(case.producer, role="producer"), rng)
        d = Request(case, world.start(case.consumer, role="consumer"), rng)
        data = {
            (group, layer): rng.integers(
                0, 1 << 16, (case.num_tokens, found.parts[0].head_dim), dtype=np.uint16
            )
            for group, found in enumerate(case.producer.model.groups)
            for layer in found.layers
        }
        expected = []
        for worker in d.engine.workers:
            expected.append({key: array.copy() for key, array in worker.caches.arrays.items()})
            for (group, layer, _), array in expected[-1].items():
                rows = case.retentions[group].missing(case.num_cached, case.num_tokens)
                if len(rows):
                    array[d.slots(group, rows)] = data[group, layer][list(rows)]
        _transfer(world, case, p, d, data)
        for worker, arrays in zip(d.engine.workers, expected, strict=True):
            np.testing.assert_equal(worker.caches.arrays, arrays)
    finally:
        world.close()
