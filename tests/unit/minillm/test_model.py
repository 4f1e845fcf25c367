"""The model: paged attention equals dense attention, and no layout, block size or chunking changes a token."""

import itertools
import random
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import ConfigError
from minillm.attention import (
    attend,
    first_of_chunk,
    first_of_window,
    local_attention,
    paged_attention,
)
from minillm.batch import Batch
from minillm.cache_groups import cache_name, layer_groups, rank_pool
from minillm.config import (
    Architecture,
    CacheConfig,
    EngineConfig,
    Layout,
    MixerConfig,
    ModelConfig,
    ParallelConfig,
)
from minillm.demo import LOGPROB_TOLERANCE
from minillm.messages import NewRequest, SequenceInput, TableChanges
from minillm.paged_cache import PagedCache, Slots
from minillm.partition import owned_query_heads, rank_share
from minillm.rank_tables import create_rank_tables
from tests.support.examples import examples
from tests.support.local_engines import generate, generated, prompt_of, token_ids
from tests.unit.minillm.seed_cases import model_of

WINDOW, CHUNK = 7, 6
# by the tokens that a layer keeps: a model with such a layer, and the first token that a query at a position sees
KINDS = {
    "full": ("llama", lambda position: 0),
    "window": ("hybrid", lambda position: max(0, position - WINDOW + 1)),
    "chunk": ("chunked-local", lambda position: position // CHUNK * CHUNK),
}


def dense_attention(q_HTD, k_HLD, v_HLD, start, first_seen):
    """One query at a time, softmax written out, float64."""
    group, scale = len(q_HTD) // len(k_HLD), q_HTD.shape[-1] ** -0.5
    out = torch.zeros(*q_HTD.shape[:2], v_HLD.shape[-1], dtype=torch.float64)
    for head in range(len(q_HTD)):
        for row in range(q_HTD.shape[1]):
            seen = slice(first_seen(start + row), start + row + 1)
            scores = (k_HLD[head // group, seen] @ q_HTD[head, row]) * scale
            out[head, row] = scores.softmax(0) @ v_HLD[head // group, seen]
    return out


@examples(60)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    layout=st.sampled_from(["HND", "NHD", "HDN"]),
    block_size=st.sampled_from([1, 3, 16, 64]),
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=3),
    common=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_paged_attention_equals_dense_attention(*, kind, layout, block_size, lengths, common, seed):
    """Several sequences in one batch, each with `start` cached tokens and `count` new ones, in shuffled blocks. With
    full attention they share the first `common` tokens.
    """
    architecture, first_seen = KINDS[kind]
    common *= kind == "full"
    lengths = [(start + common * block_size, count) for start, count in lengths]
    config = ModelConfig(
        architecture=architecture,
        num_layers=2,
        head_dim=8,
        num_heads=6,
        num_kv_heads=3,
        mixer=MixerConfig(sliding_window=WINDOW, attention_chunk=CHUNK),
    )
    share = rank_share(config, ParallelConfig(), 0)
    total_blocks = sum(-(-(start + count) // block_size) for start, count in lengths)
    shape = CacheConfig(block_size=block_size)
    engine = EngineConfig(role="mono", engine_id="e", model=config, cache=shape)
    groups = layer_groups(config, shape)
    pools = [rank_pool(engine, share, pool, total_blocks) for pool in range(len(groups))]
    cache = PagedCache(share, groups, pools, layout=layout, device="cpu")
    name = cache_name(1, kind)
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(total_blocks, generator=generator).tolist()
    shared_blocks, free = free[:common], free[common:]
    shared_kv = torch.randn(2, 3, common * block_size, 8, generator=generator)
    inputs, changes = [], TableChanges()
    expected, step = [], []
    for start, count in lengths:
        used = -(-(start + count) // block_size) - common
        blocks, free = [*shared_blocks, *free[:used]], free[used:]
        own = start + count - common * block_size
        k, v = torch.cat((shared_kv, torch.randn(2, 3, own, 8, generator=generator)), dim=2)
        q = torch.randn(6, count, 8, generator=generator)
        positions = torch.arange(start + count)
        slots = Slots(torch.tensor(blocks)[positions // block_size], positions % block_size)
        cache.write(name, (k.transpose(0, 1), v.transpose(0, 1)), slots)
        request = f"r{len(inputs)}"
        inputs.append(SequenceInput(request, [0] * count, start, 0))
        changes.scheduled_new_reqs.append(NewRequest(request, [blocks] * len(groups)))
        step.append([each.transpose(0, 1) for each in (q, k[:, start:], v[:, start:])])
        dense = dense_attention(q.double(), k.double(), v.double(), start, first_seen)
        expected.append(dense.transpose(0, 1))
    sizes = {"max_rows": 3, "max_model_len": 200, "max_batched_tokens": 64}
    tables = create_rank_tables("host", groups, device="cpu", **sizes)
    tables.update(changes)
    batch = Batch.build(inputs, groups, tables, [common] * len(groups))
    q_THD, k_THD, v_THD = (torch.cat(each) for each in zip(*step, strict=True))
    if kind == "full":
        actual = paged_attention(q_THD, cache, name, batch, 8**-0.5)
    else:
        sight = first_of_window(WINDOW) if kind == "window" else first_of_chunk(CHUNK)
        actual = local_attention((q_THD, k_THD, v_THD), cache, name, batch, sight)
    torch.testing.assert_close(actual.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


@examples(20)
@given(
    heads=st.integers(1, 3),
    group=st.integers(1, 3),
    tokens=st.integers(1, 9),
    seen=st.integers(1, 20),
)
def test_attention_without_a_mask_sees_all_of_an_encoders_output(heads, group, tokens, seen):
    q = torch.randn(heads * group, tokens, 8)
    k, v = torch.randn(2, heads, seen, 8)
    actual = attend(*(each.transpose(0, 1) for each in (q, k, v)))
    # as the last token of a sequence of that length would
    rows = [
        dense_attention(q[:, row : row + 1].double(), k.double(), v.double(), seen - 1, lambda _: 0)
        for row in range(tokens)
    ]
    torch.testing.assert_close(
        actual.transpose(0, 1).double(), torch.cat(rows, dim=1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("architecture", get_args(Architecture))
@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("block_size,chunk", [(1, 75), (7, 10), (64, 33)])
def test_layout_block_size_and_chunks_do_not_change_tokens(architecture, layout, block_size, chunk):
    model, prompt = model_of(architecture), prompt_of(75)
    shape = {"block_size": block_size, "layout": layout, "max_batched_tokens": chunk}
    actual = generate(model, prompt, 8, **shape)
    assert token_ids(actual) == token_ids(generated(model, tuple(prompt), 8))


@pytest.mark.parametrize(
    "architecture,layer,position",
    [
        *itertools.product(["llama", "mla"], [0, 7], [31, 299]),
        ("hybrid", 0, 0),
        ("hybrid", 7, 250),
        ("chunked-local", 7, 299),
        ("mamba", 7, 299),
    ],
)
def test_a_lost_block_of_one_layer_is_noticed(architecture, layer, position):
    """Otherwise equal completions of two engines would prove nothing about the cache."""
    config = ModelConfig(architecture=architecture)
    prompt = [random.Random(3).randrange(config.vocab_size) for _ in range(300)]

    def lose_block(engine):
        cache = engine.rank.cache
        name = next(name for name, own in cache.layer_of.items() if own == layer)
        group = cache.group_of[name]
        lost = engine.scheduler.blocks.tables("r")[group][
            position // cache.groups[group].block_size
        ]
        for part in cache.parts[name]:
            part[lost] = 0.0

    expected = generated(config, tuple(prompt), 12)
    damaged = generate(config, prompt, 12, after_prefill=lose_block)
    differences = [abs(a.logprob - b.logprob) for a, b in zip(damaged, expected, strict=True)]
    assert token_ids(damaged) != token_ids(expected) or max(differences) > LOGPROB_TOLERANCE


@given(num_kv_heads=st.integers(1, 8), group=st.integers(1, 8), tp_size=st.integers(1, 16))
def test_query_heads_are_shared_out_exactly_once(num_kv_heads, group, tp_size):
    """Every query head has one rank, and that rank holds its KV head."""
    config = ModelConfig(num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads)
    try:
        heads = [owned_query_heads(config, rank, tp_size) for rank in range(tp_size)]
    except ConfigError:
        assert tp_size > num_kv_heads
        return
    assert sorted(head for owned in heads for head in owned) == list(range(config.num_heads))
    for rank, owned in enumerate(heads):
        kv_heads = rank_share(config, ParallelConfig(tp_size=tp_size), rank).kv_heads
        assert {head // group for head in owned} == set(kv_heads)


def test_weights_from_a_file_are_used_and_checked(tmp_path):
    from safetensors.torch import save_file

    from minillm.weights import file_source, random_source

    path = str(tmp_path / "model.safetensors")
    embedding = random_source(7)("model.embed_tokens.weight", (256, 64))
    save_file({"model.embed_tokens.weight": embedding.half()}, path)
    source = file_source(path)
    assert torch.equal(source("model.embed_tokens.weight", (256, 64)), embedding.half().float())
    tied = source("lm_head.weight", (256, 64))
    assert torch.equal(tied, embedding.half().float())
    with pytest.raises(ConfigError, match="lacks a tensor"):
        source("model.norm.weight", (64,))
    with pytest.raises(ConfigError, match="another shape"):
        source("model.embed_tokens.weight", (256, 32))
