"""Plans for random pairs of engines: equal to the naive plan, in ordered and bounded chunks."""

from collections import Counter
from math import ceil, lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import GeometryError
from kvconnector.planning import (
    ALL_LAYERS,
    plan_reads,
    plan_routes,
    plan_transfer,
)
from kvconnector.planning import plan as plan_module
from kvconnector.planning.naive import naive_plan, plan_items
from tests.support.strategies import transfers


def planned(transfer, layers=ALL_LAYERS):
    routes = plan_routes(transfer.topology, transfer.producer)
    bounds = {"chunk_bytes": transfer.chunk_bytes, "layers": layers}
    return plan_reads(routes, transfer.token_ranges, **bounds)


@given(transfers(), st.integers(0, 8), st.integers(0, 8))
def test_plans_deliver_every_item_exactly_once(transfer, first, stop):
    for layers in (ALL_LAYERS, range(first, max(first, stop))):
        plan = planned(transfer, layers)
        wanted = naive_plan(transfer.topology, transfer.producer, transfer.token_ranges, layers)
        delivered = list(plan_items(plan, transfer.consumer))
        assert Counter(delivered) == Counter(wanted)
        # once from all sources together
        assert len({item[1:] for item in delivered}) == len(delivered)
        for read in plan:
            items = list(plan_items([read], transfer.consumer))
            assert read.total_bytes == read.chunk_nbytes.sum() > 0
            assert read.layer_stop == 1 + max(item.layer for item in items)
            groups = transfer.consumer.groups
            assert read.token_stop == max(
                (1 + item.token) * groups[item.group].row_tokens for item in items
            )


@given(transfers())
def test_chunks_are_ordered_bounded_and_few(transfer):
    for read in planned(transfer):
        assert read.chunk_nbytes.max() <= transfer.chunk_bytes
        assert read.chunk_nbytes.min() > 0
        check_order(read)
        for index, segment in enumerate(read.segments):
            chunks = read.chunks[read.chunks["segment"] == index]
            tokens = segment.stripe.members(transfer.token_ranges[segment.group])
            if tokens:
                check_cuts(transfer, segment, tokens, chunks)


@given(transfers())
def test_the_first_and_the_last_chunk_are_short(transfer):
    everything = Counter(plan_items(planned(transfer), transfer.consumer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_module, "SHORT_CHUNK_BYTES", short := transfer.chunk_bytes // 4)
        cut = planned(transfer)
        assert Counter(plan_items(cut, transfer.consumer)) == everything
        for read in cut:
            check_order(read)
            for end in (0, -1):
                assert read.chunk_nbytes[end] <= short or read.chunks["num_parts"][end] == 1


def check_order(read):
    keys = read.chunks[["segment", "part_start", "token_start"]].tolist()
    assert keys == sorted(set(keys))


def check_cuts(transfer, segment, tokens, chunks):
    """Check that chunks are few and large: several rows where a row fits, else one row in pieces of whole blocks."""
    fit = transfer.chunk_bytes // segment.part_token_bytes
    num_rows = len(segment.layers) * segment.num_parts
    if fit >= len(tokens):
        assert set(chunks["num_tokens"].tolist()) == {len(tokens)}
        assert len(chunks) == ceil(num_rows / (fit // len(tokens)))
        return
    ours = transfer.consumer.groups[segment.group].virtual_block_tokens
    theirs = transfer.producer.ranks[0].groups[segment.group].virtual_block_tokens
    stripe = segment.stripe
    whole = [lcm(size, stripe.period) for size in (lcm(ours, theirs), ours, theirs)]
    members = sorted((size // stripe.period * stripe.run for size in whole), reverse=True)
    best = next((a for a in members if a <= fit), 1)
    inner = chunks["token_start"][chunks["token_start"] != tokens.start]
    assert not (inner % best).any()
    # all but the first and the last piece of a row are full
    assert len(chunks) <= num_rows * (ceil(len(tokens) / (fit // best * best)) + 1)


@given(transfers(), st.data())
def test_chunks_smaller_than_a_token_are_refused(transfer, data):
    wide = [
        segment.part_token_bytes
        for read in planned(transfer)
        for segment in read.segments
        if segment.stripe.members(transfer.token_ranges[segment.group])
    ]
    if not wide:
        assert planned(transfer) == ()
        return
    chunk_bytes = data.draw(st.integers(0, max(wide) - 1))
    with pytest.raises(GeometryError, match="chunk_bytes") as refused:
        plan_transfer(
            transfer.topology, transfer.producer, transfer.token_ranges, chunk_bytes=chunk_bytes
        )
    assert refused.value.context["chunk_bytes"] == chunk_bytes
