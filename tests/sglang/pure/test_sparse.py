"""Sparse attention's caches arrive row by row, by real workers, and nothing else of the decode engine changes."""

import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from kvconnector.errors import GeometryError, IncompatiblePeerError
from kvconnector.integrations.sglang.caches import registered_groups
from kvconnector.integrations.sglang.metadata import MetadataRows
from kvconnector.integrations.sglang.transfers import Stage
from tests.sglang.pure.engines import DEADLINE_S, Pair, error_of
from tests.sglang.pure.sparse_pools import WINDOW, SparseModel, SparsePools

PREFILL = [5, 2, 9, 3, 11, 7, 1, 8], 1
DECODE = [8, 3, 6, 1, 10, 2, 9, 4], 2
"""The pages of each engine's request, and its slot."""
DSA = SparseModel(layers=4, shared=(1, 2))
V4 = SparseModel(layers=5, ratios=(0, 128, 4, 128, 4))
V4_DRAFT = SparseModel(layers=3, ratios=(128, 4, 0), draft=1)


def _pair(model, *, ring=8, decode_ring=8):
    size = 64 if model.ratios is None else 256
    pools = [partial(SparsePools, ring=each) for each in (ring, decode_ring)]
    prefill, decode = ({"pools": each, "page_size": size} for each in pools)
    return closing(Pair(model, prefill=prefill, decode=decode))


def _send(pair, sent, start, stop, num_tokens):
    pools, (pages, slot) = pair.prefill.pools[0], PREFILL
    states = pools.states(num_tokens, 0, pages, slot) if stop == num_tokens else None
    sent[0].init(len(pages), 1)
    size = pools.page_size
    sent[0].send(pages[start // size : -(-stop // size)], states, stop - start)


def _load(pair, wanted, num_tokens, prefix=0):
    """Load the prompt, some of which is computed."""
    pools, (pages, slot) = pair.decode.pools[0], DECODE
    pair.until_started(*wanted)
    wanted[0].num_tokens, wanted[0].window_tokens = num_tokens, WINDOW
    taken = pages[prefix // pools.page_size : -(-num_tokens // pools.page_size)]
    states = pools.states(num_tokens, prefix, pages, slot)
    wanted[0].send_metadata(taken, 2, states, prefix)


def _check(pair, before, num_tokens, prefix=0, **options):
    """Check all bytes of the decode engine: those of the prompt's rows are the prefill engine's, others as `before`."""
    prefill, decode = pair.prefill.pools[0], pair.decode.pools[0]
    after = [tensor.clone() for tensor in decode.tensors]
    for tensor, old in zip(decode.tensors, before, strict=True):
        tensor.copy_(old)
    both = (decode, DECODE), (prefill, PREFILL)
    moved = [pools.moved(num_tokens, prefix, *ids, **options) for pools, ids in both]
    for ours, theirs in zip(*moved, strict=True):
        ours.copy_(theirs)
    for tensor, arrived in zip(decode.tensors, after, strict=True):
        assert tensor.equal(arrived)


@pytest.fixture(scope="module")
def pairs():
    with _pair(DSA) as dsa, _pair(V4) as v4:
        yield {"dsa": dsa, "v4": v4}


ROOMS = count(1000)
LENGTHS = (
    1,
    3,
    4,
    5,
    63,
    64,
    65,
    127,
    128,
    129,
    255,
    256,
    257,
    260,
    264,
    300,
    1000,
    1001,
    1024,
    1025,
)


@pytest.mark.ucx
@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("name, chunk", [("dsa", None), ("dsa", 128), ("v4", None), ("v4", 256)])
def test_every_row_of_a_prompt_arrives_and_nothing_else(pairs, name, chunk, num_tokens):
    if name == "dsa" and num_tokens > 512:
        num_tokens -= 600  # it has pages for 512
    pair, room = pairs[name], next(ROOMS)
    before = [tensor.clone() for tensor in pair.decode.pools[0].tensors]
    sent, wanted = pair.send(room), pair.want(room)
    step = chunk or num_tokens
    for start in range(0, num_tokens, step):
        _send(pair, sent, start, min(start + step, num_tokens), num_tokens)
        if start == 0:
            _load(pair, wanted, num_tokens)
        wanted[0].poll()
    assert {*pair.until_over(*sent, *wanted)} == {Stage.DONE}
    _check(pair, before, num_tokens)


@pytest.mark.ucx
@pytest.mark.parametrize("name, num_computed, num_tokens", [("dsa", 192, 300), ("v4", 512, 900)])
def test_whole_rows_are_read_while_the_prompt_is_computed(pairs, name, num_computed, num_tokens):
    pair, room = pairs[name], next(ROOMS)
    prefill, decode = pair.prefill.pools[0], pair.decode.pools[0]
    sent, wanted = pair.send(room), pair.want(room)
    _send(pair, sent, 0, num_computed, num_tokens)
    _load(pair, wanted, num_tokens)
    until_s = time.monotonic() + DEADLINE_S

    def has_arrived():
        spans = decode.streamed(num_computed, *DECODE), prefill.streamed(num_computed, *PREFILL)
        return all(ours.equal(theirs) for ours, theirs in zip(*spans, strict=True))

    while not has_arrived():
        assert time.monotonic() < until_s
        wanted[0].poll()
        time.sleep(0.001)
    _send(pair, sent, num_computed, num_tokens, num_tokens)
    assert {*pair.until_over(*sent, *wanted)} == {Stage.DONE}


@pytest.mark.ucx
@pytest.mark.parametrize("num_tokens", [1, 127, 258, 1001])
def test_windows_of_a_draft_model_and_rings_of_other_lengths(num_tokens):
    with _pair(V4_DRAFT, ring=8, decode_ring=16) as pair:
        before = [tensor.clone() for tensor in pair.decode.pools[0].tensors]
        sent, wanted = pair.send(92), pair.want(92)
        _send(pair, sent, 0, num_tokens, num_tokens)
        _load(pair, wanted, num_tokens)
        assert {*pair.until_over(*sent, *wanted)} == {Stage.DONE}
        _check(pair, before, num_tokens)


@pytest.mark.ucx
@pytest.mark.parametrize("num_tokens", [1, 258, 1001])
def test_a_draft_model_of_the_decode_engine_alone_keeps_its_windows(num_tokens):
    """It computes them itself from then on; its rings are longer than the prefill engine's."""

    def without_draft(model, **options):
        return SparsePools(replace(model, draft=0), ring=8, **options)

    prefill = {"pools": without_draft, "page_size": 256}
    decode = {"pools": partial(SparsePools, ring=16), "page_size": 256}
    with closing(Pair(V4_DRAFT, prefill=prefill, decode=decode)) as pair:
        before = [tensor.clone() for tensor in pair.decode.pools[0].tensors]
        sent, wanted = pair.send(94), pair.want(94)
        _send(pair, sent, 0, num_tokens, num_tokens)
        _load(pair, wanted, num_tokens)
        assert {*pair.until_over(*sent, *wanted)} == {Stage.DONE}
        _check(pair, before, num_tokens, with_draft=False)


def _registered(model=V4, **changes):
    pools = SparsePools(model, is_prefill=True, page_size=64 if model.ratios is None else 256)
    vars(pools.args).update(changes)
    return registered_groups(pools.args, pools.shape, MetadataRows(pools.args, "cpu"))


@pytest.mark.parametrize(
    "model, changes, text",
    [
        (V4, {"kv_layout": "v41,c4:v41,c128:v41"}, "in this layout"),
        (V4, {"kv_layout": "v4,c4:v41_fp4,c128:v4"}, "in this layout"),
        (V4, {"mla_compression_ratios": (0, 128, 2, 128, 4)}, "rows of 4 and of 128"),
        (V4, {"page_size": 64}, "pages of 256 tokens"),
        (V4, {"num_draft_entries": 1}, "draft models that have none"),
        (V4, {"kv_layout": "uniform_fp8"}, "not that of its rows"),
        (V4, {"state_types": ["swa", "request_row"]}, "caches of these kinds"),
        (V4, {"state_types": ["swa_ring", "c128_state"]}, "caches of these kinds"),
        (DSA, {"page_size": 128}, "pages of 64 tokens"),
        (DSA, {"state_item_lens": [[64 * 100, 0, 0, 64 * 100]]}, "not that of its rows"),
    ],
)
def test_what_is_not_known_is_refused_by_name(model, changes, text):
    with pytest.raises(GeometryError, match=text):
        _registered(model, **changes)


def test_states_of_another_type_are_refused():
    pools = SparsePools(V4, is_prefill=True, page_size=256)
    pools.args.state_item_lens[0] = [
        each // 2 if each == 8 * 8192 else each for each in pools.args.state_item_lens[0]
    ]
    with pytest.raises(GeometryError, match="rings of 8 or 16"):
        registered_groups(pools.args, pools.shape, MetadataRows(pools.args, "cpu"))


def test_a_model_with_compressed_rows_has_a_group_for_each_kind_of_row():
    groups, kinds = _registered(V4_DRAFT)
    names = ["c4", "c128", "swa", "c4-state", "c128-state", "row", "swa"]
    assert [each.kind for each in kinds] == names
    sizes = {
        each.kind: cache.geometry.block_size for cache, each in zip(groups, kinds, strict=True)
    }
    assert sizes == {"c4": 64, "c128": 2, "swa": 256, "c4-state": 1, "c128-state": 128, "row": 1}
    assert [cache.geometry.layers for cache in groups[:3]] == [(1,), (0,), (0, 1, 2)]
    parts = [(part.head_dim * part.item_size_bytes) for part in groups[0].geometry.parts]
    assert parts == [576, 8, 128, 4]


@pytest.mark.ucx
@pytest.mark.parametrize("element", ["index_keys", "rotated_index_keys"])
def test_an_indexers_keys_fit_only_those_that_are_rotated_alike(element):
    """They have as many bytes, and a query of the other kind would select other tokens."""

    class Named(SparsePools):
        def __init__(self, *args, is_prefill, **options):
            super().__init__(*args, is_prefill=is_prefill, **options)
            name = element if is_prefill else "rotated_index_keys"
            self.shape = replace(self.shape, index_element=name)

    engine = {"pools": Named, "page_size": 64}
    with closing(Pair(DSA, prefill=engine, decode=engine)) as pair:
        sent, wanted = pair.send(94), pair.want(94)
        _send(pair, sent, 0, 100, 100)
        _load(pair, wanted, 100)
        is_alike = element == "rotated_index_keys"
        assert pair.until_over(*wanted) == [Stage.DONE if is_alike else Stage.FAILED]
        if not is_alike:
            refused = error_of(wanted[0])
            assert isinstance(refused, IncompatiblePeerError)
            assert element in str(refused)
        pair.until_over(*sent) if is_alike else sent[0].abort()


@pytest.mark.ucx
def test_an_accumulated_state_fits_only_its_like():
    class Accumulating(SparsePools):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.shape = replace(self.shape, accumulates_c128=True)

    other = {"pools": Accumulating, "page_size": 256}
    prefill = {"pools": SparsePools, "page_size": 256}
    room = {"KVCONNECTOR_STAGING_CHUNK_BYTES": f"{1 << 20}"}  # for a whole state
    with closing(Pair(V4, prefill=prefill, decode=other, environ=room)) as pair:
        wanted = pair.want(93)
        _load(pair, wanted, 100)
        assert {*pair.until_over(*wanted)} == {Stage.FAILED}
        assert isinstance(error_of(wanted[0]), IncompatiblePeerError)
