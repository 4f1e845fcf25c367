"""Between engines of any shapes, a consumer loads the bytes that its producer held."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes import LAYOUTS, FakeEngine, dense_of
from tests.support.loopback import LoopbackFaults
from tests.support.strategies import shape_pairs
from tests.support.world import World

NUM_BLOCKS = 40


@st.composite
def engines(draw, engine_id, model, num_optional):
    tp_size = draw(st.integers(1, 4))
    block_sizes = tuple(draw(st.integers(1, 6)) for _ in model.groups)
    turns = [tokens for tokens in range(1, 7) if not any(size % tokens for size in block_sizes)]
    return FakeEngine(
        engine_id,
        model,
        tp_size=tp_size,
        pp_size=draw(st.integers(1, min(2, model.num_layers))),
        block_sizes=block_sizes,
        num_blocks=(NUM_BLOCKS,) * len(model.groups),
        layout=draw(st.sampled_from(LAYOUTS)),
        dcp_size=draw(st.sampled_from([n for n in range(1, tp_size + 1) if tp_size % n == 0])),
        interleave_tokens=draw(st.sampled_from(turns)),
        num_optional=num_optional,
    )


@st.composite
def cases(draw):
    producer, consumer = draw(shape_pairs())
    num_tokens = draw(st.integers(1, 30))
    starts = [draw(st.integers(0, num_tokens)) for _ in consumer[0].groups]
    return (
        draw(engines("p", *producer)),
        draw(engines("d", *consumer)),
        num_tokens,
        [
            range(start // group.row_tokens, num_tokens // group.row_tokens)
            for start, group in zip(starts, consumer[0].groups, strict=True)
        ],
        draw(st.sampled_from([180, 300, 16 * 1024])),  # one token of a part has 180 at most
        draw(st.integers(0, 2**16)),
    )


def _blocks(rng, shape, num_tokens):
    return [
        rng.permutation(NUM_BLOCKS)[: -(-num_tokens // (size * shape.dcp_size))].tolist()
        for size in shape.block_sizes
    ]


@given(cases())
def test_loaded_bytes_equal_the_producers(case):
    producer_shape, consumer_shape, num_tokens, ranges, chunk_bytes, seed = case
    staging = {"chunk_bytes": chunk_bytes, "budget_bytes": 64 * 1024, "window": 3}
    world = World(seed=seed, settings={"staging": staging})
    world.network.faults = LoopbackFaults(max_delay_calls=2)
    rng = np.random.default_rng(seed)
    try:
        p = world.start(producer_shape, role="producer")
        d = world.start(consumer_shape, role="consumer")
        theirs = _blocks(rng, producer_shape, num_tokens)
        ours = _blocks(rng, consumer_shape, num_tokens)
        expected = dense_of([worker.caches for worker in d.workers], ours, num_tokens)
        source = dense_of([worker.caches for worker in p.workers], theirs, num_tokens)
        for (group, layer, part), dense in expected.items():
            tokens = slice(ranges[group].start, ranges[group].stop)
            if (group, layer, part) in source:  # optional groups and layers keep what they held
                dense[:, tokens] = source[group, layer, part][:, tokens]
        outside = [_others(worker, ours) for worker in d.workers]

        offer = p.grant("r", theirs, num_tokens)
        d.want("w", offer)
        d.load("w", offer, ours, ranges)
        assert world.run(world.is_quiet)

        assert all(
            worker.poll().finished_recving == {"w"}
            and not worker.driver.links.refusals.counts
            and worker.driver.consumer._loads == {}
            for worker in d.workers
        )
        assert all(worker.poll().finished_sending == {"r"} for worker in p.workers)
        caches = [worker.caches for worker in d.workers]
        for mine in caches:  # each one last, so that no replica hides another
            loaded = dense_of([*caches, mine], ours, num_tokens)
            np.testing.assert_equal(loaded, expected)
        np.testing.assert_equal([_others(worker, ours) for worker in d.workers], outside)
    finally:
        world.close()


def _others(worker, ours):
    """Return the bytes of all blocks that are not the request's."""
    arrays = worker.caches.arrays.items()
    return [np.delete(array, ours[group], axis=0) for (group, _, _), array in arrays]
