"""Layers of a sparse cache that the ranks of prefill context parallelism have split arrive whole, from their owners."""

import random
from contextlib import closing
from dataclasses import replace

import msgspec
import pytest

from kvconnector.errors import ConfigError, GeometryError
from kvconnector.integrations.sglang.caches import registered_groups
from kvconnector.integrations.sglang.metadata import MetadataRows
from kvconnector.integrations.sglang.split import check_option, joined_groups
from kvconnector.integrations.sglang.transfers import Stage
from tests.sglang.pure.engines import Pair
from tests.sglang.pure.sparse_pools import SparseModel, SparsePools

PREFILL = [5, 2, 9, 3, 11, 7, 1, 8], 1
DECODE = [8, 3, 6, 1, 10, 2, 9, 4], 2
"""The pages of each engine's request, and its slot."""
PAGE = 64
MODEL = SparseModel(layers=7, shared=(1, 2, 4), draft=1)


def in_runs(num_layers, num_ranks):
    """Return each rank's layers, as SGLang splits them: the first ranks have one more if they do not divide."""
    size, more = divmod(num_layers, num_ranks)
    found, start = [], 0
    for rank in range(num_ranks):
        stop = start + size + (rank < more)
        found.append([*range(start, stop)])
        start = stop
    return found


def at_random(num_layers, num_ranks, seed):
    """Return each rank's layers, at least one, in an order that nobody could guess."""
    drawn = random.Random(seed)
    order = drawn.sample(range(num_layers), num_layers)
    cuts = sorted(drawn.sample(range(1, num_layers), num_ranks - 1))
    return [sorted(order[a:b]) for a, b in zip([0, *cuts], [*cuts, num_layers], strict=True)]


def _pair(owners, model, decode):
    prefill = {"pools": SparsePools, "pp_size": len(owners), "owners": owners}
    common = {"pools": SparsePools, "page_size": PAGE}
    return closing(Pair(model, prefill=common | prefill, decode=common | decode))


def _send(pair, sent, start, stop, num_tokens):
    pages, slot = PREFILL
    for transfer, pools in zip(sent, pair.prefill.pools, strict=True):
        states = pools.states(num_tokens, 0, pages, slot) if stop == num_tokens else None
        transfer.init(len(pages), 1)
        transfer.send(pages[start // PAGE : -(-stop // PAGE)], states, stop - start)


def _load(pair, wanted, num_tokens, prefix):
    pages, slot = DECODE
    pair.until_started(*wanted)
    for transfer, pools in zip(wanted, pair.decode.pools, strict=True):
        transfer.num_tokens = num_tokens
        taken = pages[prefix // PAGE : -(-num_tokens // PAGE)]
        transfer.send_metadata(taken, 2, pools.states(num_tokens, prefix, pages, slot), prefix)


def _rows(pools, layer, tokens, pages):
    """Yield the bytes of these tokens in a layer, to be read or written: their latents, then their keys."""
    planes = [(pools.kv[layer], (656,))]
    if layer not in pools.model.shared:
        planes.append((pools.index[layer], (128, 4)))
    for tensor, widths in planes:
        for token in tokens:
            page, at, offset = tensor[pages[token // PAGE]], token % PAGE, 0
            for width in widths:
                yield page[offset + at * width : offset + (at + 1) * width]
                offset += PAGE * width


def _transfer(pair, room, num_tokens, *, prefix=0, step=None, with_draft=True):
    """Transfer a prompt, and check every byte of every rank of the decode engine."""
    before = [[each.clone() for each in pools.tensors] for pools in pair.decode.pools]
    for pools in pair.decode.pools:
        pools.aux[0][2] = 0
    sent, wanted = pair.send(room), pair.want(room)
    step = step or num_tokens
    for start in range(0, num_tokens, step):
        _send(pair, sent, start, min(start + step, num_tokens), num_tokens)
        if start == 0:
            _load(pair, wanted, num_tokens, prefix)
        for each in wanted:
            each.poll()
    assert {*pair.until_over(*sent, *wanted)} == {Stage.DONE}
    for pools, old in zip(pair.decode.pools, before, strict=True):
        _check(pair.prefill, pools, old, range(prefix, num_tokens), with_draft)


def _check(prefill, pools, old, tokens, with_draft):
    """Check all bytes of a rank: those of the tokens are of the layers' owners, others are as before."""
    after = [tensor.clone() for tensor in pools.tensors]
    for tensor, earlier in zip(pools.tensors, old, strict=True):
        tensor.copy_(earlier)
    for layer in pools.kv:
        if layer < MODEL.layers or with_draft:
            theirs, *_ = (each for each in prefill.pools if layer in each.kv)
            sides = (pools, DECODE), (theirs, PREFILL)
            rows = [_rows(side, layer, tokens, pages) for side, (pages, _) in sides]
            for ours, value in zip(*rows, strict=True):
                ours.copy_(value)
    for tensor, arrived in zip(pools.tensors, after, strict=True):
        assert tensor.equal(arrived)
    assert pools.aux[0][2].all(), "the row of metadata of the last rank"


@pytest.mark.ucx
@pytest.mark.parametrize(
    "owners, decode",
    [
        (in_runs(7, 2), {}),
        (in_runs(7, 7), {}),
        (in_runs(7, 3), {"tp_size": 2}),
        (in_runs(7, 4), {"pp_size": 2}),
        (at_random(7, 3, 1), {"pp_size": 3}),
        (at_random(7, 5, 2), {"pp_size": 2, "tp_size": 2}),
        ([[1, 2, 4], [0, 3, 5, 6]], {}),
    ],
    ids=["2", "7", "3-tp2", "4-pp2", "random3-pp3", "random5-pp2-tp2", "keys in one rank"],
)
def test_every_layer_of_a_prompt_comes_from_its_owner(owners, decode):
    """In pieces and at once, beyond what the decode engine has cached or not. An engine of stages drafts nothing."""
    model = replace(MODEL, draft=int("pp_size" not in decode))
    with _pair(owners, model, decode) as pair:
        prompts = [(1, 0, None), (64, 0, None), (300, 0, 128), (300, 128, 64), (511, 320, None)]
        for room, (num_tokens, prefix, step) in enumerate(prompts, 1):
            _transfer(pair, room, num_tokens, prefix=prefix, step=step)


@pytest.mark.ucx
def test_copies_of_split_ranks_and_a_draft_model_of_one_engine_alone():
    """Attention's tensor parallelism within a rank of context parallelism copies the latents."""
    prefill = {"pools": SparsePools, "page_size": PAGE, "owners": in_runs(7, 2)}
    prefill |= {"pp_size": 2, "tp_size": 2}
    for drafts in ((1, 0), (0, 1)):
        of_sides = [
            lambda model, count=count, **options: SparsePools(
                replace(model, draft=count), **options
            )
            for count in drafts
        ]
        decode = {"pools": of_sides[1], "page_size": PAGE, "tp_size": 2}
        with closing(Pair(MODEL, prefill=prefill | {"pools": of_sides[0]}, decode=decode)) as pair:
            _transfer(pair, 5, 200, with_draft=False)


def _listed(owners, model=MODEL, **changes):
    """Return what the ranks of an engine would register each by itself: groups, kinds and shapes."""
    found = []
    for rank in range(len(owners)):
        pools = SparsePools(
            model,
            is_prefill=True,
            page_size=PAGE,
            rank=(rank, 0),
            pp_size=len(owners),
            owners=owners,
        )
        vars(pools.args).update(changes.get(f"rank{rank}", {}))
        groups = registered_groups(pools.args, pools.shape, MetadataRows(pools.args, "cpu"))
        found.append((*groups, pools.shape))
    return found


def _joined(listed):
    """Return the groups of all ranks, joined."""
    sent = []
    for each in listed:
        with pytest.raises(StopIteration):
            joined_groups(*each, _stop_with(sent))
    return [joined_groups(*each, lambda _: sent) for each in listed]


def _stop_with(sent):
    def gather(payload):
        sent.append(payload)
        raise StopIteration

    return gather


def test_ranks_without_the_draft_model_or_keys_have_groups_without_layers():
    joined = _joined(_listed([[0], [1, 2], [3, 4, 5, 6]]))
    kinds = [each.kind for each in joined[0][1]]
    assert kinds == ["kv", "dsa", "row", "kv", "dsa"]
    assert all(found == joined[0][1] for _, found in joined)
    layers = [[group.geometry.layers for group in groups] for groups, _ in joined]
    row = tuple(range(8))
    assert layers[0] == [(0,), (0,), (), (), ()]
    assert layers[1] == [(1, 2), (), (), (), ()]
    assert layers[2] == [(3, 4, 5, 6), (3, 5, 6), row, (7,), (7,)]
    alike = {
        tuple(msgspec.structs.replace(group.geometry, layers=()) for group in groups)
        for groups, _ in joined
    }
    assert len(alike) == 1


def test_other_engines_ask_nobody():
    groups, kinds, shape = _listed([[*range(7)]])[0]
    found = joined_groups(groups, kinds, replace(shape, is_split=False), None)
    assert found == (groups, kinds)


@pytest.mark.parametrize(
    "owners, wrong",
    [
        ([[0, 1, 2, 3], [3, 4, 5, 6]], {"owned_twice": [3]}),
        ([[0, 1, 2], [4, 5, 6]], {"owned_by_none": [3]}),
        ([[0, 2], [1, 2, 4, 6]], {"owned_twice": [2], "owned_by_none": [3, 5]}),
    ],
)
def test_a_layer_with_two_owners_or_none_is_refused(owners, wrong):
    with pytest.raises(GeometryError, match="do not hold each layer exactly once") as refused:
        _joined(_listed(owners))
    context = refused.value.context
    assert {name: context[name] for name in wrong} == wrong
    assert "unknown" not in context


def test_a_layer_that_the_model_has_not_is_refused():
    listed = [
        (groups, kinds, replace(shape, num_layers=6))
        for groups, kinds, shape in _listed([[0, 1, 2], [3, 4, 5, 6]], replace(MODEL, draft=0))
    ]
    with pytest.raises(GeometryError, match="do not hold each layer exactly once") as refused:
        _joined(listed)
    assert refused.value.context["unknown"] == [6]


def test_caches_that_no_rank_has_all_of_are_refused():
    first, last = _listed([[0, 1, 2], [3, 4, 5, 6]])
    groups, kinds, shape = first
    other = kinds[0]._replace(kind="mamba")
    with pytest.raises(GeometryError, match="no rank has all of"):
        _joined([([*groups, groups[0]], (*kinds, other), shape), last])


def test_what_is_not_known_of_the_option_is_refused_with_a_way_out():
    plain = {"is_prefill": True, "states": ["dsa"], "num_ranks": 8, "num_layers": 78}
    check_option(**plain)
    for change, text in (
        ({"is_prefill": False}, "decode engine needs all layers.*start it without"),
        ({"states": ["swa", "mamba"]}, "sparse indexer.*start without"),
        ({"num_ranks": 79}, "smaller --attn-cp-size"),
    ):
        with pytest.raises(ConfigError, match=text):
            check_option(**plain | change)
