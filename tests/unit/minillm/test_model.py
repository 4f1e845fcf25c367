"""The model: paged attention equals dense attention, and no split, layout or chunking changes a token."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import get_args

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvconnector.errors import ConfigError
from minillm.attention import paged_attention
from minillm.batch import Batch
from minillm.cache_groups import layer_groups, rank_group
from minillm.config import (
    Architecture,
    CacheConfig,
    Layout,
    MixerConfig,
    ModelConfig,
    ParallelConfig,
)
from minillm.demo import LOGPROB_TOLERANCE
from minillm.messages import SequenceInput
from minillm.paged_cache import PagedCache, Slots
from minillm.partition import owned_query_heads, rank_share
from minillm.rank_tables import create_rank_tables
from minillm.threaded import ShardedModel, StepSequence, table_changes, token_ids

SMALL = ModelConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_layers=4,
    head_dim=16,
    mixer=MixerConfig(latent_rank=24, sliding_window=21),
)
MODELS = [msgspec.structs.replace(SMALL, architecture=name) for name in get_args(Architecture)]
PROMPT = [random.Random(1).randrange(256) for _ in range(75)]


def dense_attention(
    q_HTD: torch.Tensor, k_HLD: torch.Tensor, v_HLD: torch.Tensor, start: int, scale: float
) -> torch.Tensor:
    """One query at a time, softmax written out, float64."""
    group = len(q_HTD) // len(k_HLD)
    out = torch.zeros(*q_HTD.shape[:2], v_HLD.shape[-1], dtype=torch.float64)
    for head in range(len(q_HTD)):
        for row in range(q_HTD.shape[1]):
            seen = start + row + 1
            scores = (k_HLD[head // group, :seen] @ q_HTD[head, row]) * scale
            out[head, row] = scores.softmax(0) @ v_HLD[head // group, :seen]
    return out


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from(["HND", "NHD", "HDN"]),
    block_size=st.sampled_from([1, 3, 16, 64]),
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_paged_attention_equals_dense_attention(
    layout: Layout, block_size: int, lengths: list[tuple[int, int]], seed: int
) -> None:
    """Several sequences in one batch, each with `start` cached tokens and `count` new ones, in shuffled blocks."""
    config = ModelConfig(num_layers=1, head_dim=8, num_heads=6, num_kv_heads=3)
    share = rank_share(config, ParallelConfig(), 0)
    total_blocks = sum(-(-(start + count) // block_size) for start, count in lengths)
    groups = layer_groups(config, CacheConfig(block_size=block_size))
    specs = [rank_group(config, CacheConfig(block_size=block_size), groups[0], share)]
    cache = PagedCache(share, groups, specs, num_blocks=[total_blocks], layout=layout, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    free = torch.randperm(total_blocks, generator=generator).tolist()
    sequences: list[StepSequence] = []
    expected, queries = [], []
    for start, count in lengths:
        used = -(-(start + count) // block_size)
        blocks, free = free[:used], free[used:]
        k, v = torch.randn(2, 3, start + count, 8, generator=generator)
        q = torch.randn(6, count, 8, generator=generator)
        positions = torch.arange(start + count)
        slots = Slots(torch.tensor(blocks)[positions // block_size], positions % block_size)
        cache.write(0, (k.transpose(0, 1), v.transpose(0, 1)), slots)
        name = f"r{len(sequences)}"
        sequences.append(StepSequence(name, [0] * count, start, False, [blocks]))
        queries.append(q.transpose(0, 1))
        expected.append(
            dense_attention(q.double(), k.double(), v.double(), start, 0.3).transpose(0, 1)
        )
    sizes = {"max_rows": 3, "max_model_len": 64, "max_batched_tokens": 64}
    tables = create_rank_tables("host", groups, device="cpu", **sizes)
    tables.update(table_changes(sequences, set()))
    inputs = [SequenceInput(each.name, each.token_ids, each.start, 0) for each in sequences]
    batch = Batch.build(inputs, groups, tables)
    actual = paged_attention(torch.cat(queries), cache, 0, batch, 0.3)
    torch.testing.assert_close(actual.double(), torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.architecture)
@pytest.mark.parametrize("layout", get_args(Layout))
@pytest.mark.parametrize("block_size,chunk", [(1, 75), (7, 10), (64, 33)])
def test_layout_block_size_and_chunks_do_not_change_tokens(
    model: ModelConfig, layout: Layout, block_size: int, chunk: int
) -> None:
    expected = ShardedModel(model, ParallelConfig(), CacheConfig(), 100).generate(PROMPT, 8)
    cache = CacheConfig(block_size=block_size, layout=layout)
    actual = ShardedModel(model, ParallelConfig(), cache, 100).generate(PROMPT, 8, chunk=chunk)
    assert token_ids(actual) == token_ids(expected)


SPLIT = [
    ParallelConfig(tp_size=2),
    ParallelConfig(tp_size=3),
    ParallelConfig(tp_size=8),
    ParallelConfig(pp_size=2),
    ParallelConfig(pp_size=3, pp_layers=(2, 1, 1)),
    ParallelConfig(tp_size=2, pp_size=2, pp_layers=(3, 1)),
]
SHARED = [
    ParallelConfig(tp_size=2, dcp_size=2),
    ParallelConfig(tp_size=4, dcp_size=2, interleave_tokens=4),
    ParallelConfig(tp_size=4, dcp_size=4, interleave_tokens=8),
    ParallelConfig(tp_size=2, pp_size=2, dcp_size=2, interleave_tokens=8),
]
SPLITS = [
    *((model, parallel, PROMPT) for model in MODELS for parallel in SPLIT),
    # only models that keep every token share tokens
    *(
        each
        for parallel in SHARED
        for model in MODELS[:2]
        for each in ((model, parallel, PROMPT), (model, parallel, PROMPT[:1]))
    ),
]


@pytest.mark.parametrize(
    "model,parallel,prompt",
    SPLITS,
    ids=lambda value: (
        getattr(value, "architecture", None)
        or (len(value) if isinstance(value, list) else repr(value))
    ),
)
def test_parallelism_does_not_change_tokens(
    model: ModelConfig, parallel: ParallelConfig, prompt: list[int]
) -> None:
    expected = ShardedModel(model, ParallelConfig(), CacheConfig(), 100).generate(prompt, 8)
    split = ShardedModel(model, parallel, CacheConfig(block_size=8), 100)
    actual = split.generate(prompt, 8, chunk=30)
    assert token_ids(actual) == token_ids(expected)
    for mine, other in zip(actual, expected, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=LOGPROB_TOLERANCE / 10)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.architecture)
def test_a_batch_computes_what_its_sequences_compute_alone(model: ModelConfig) -> None:
    other = [random.Random(2).randrange(256) for _ in range(9)]
    single = ShardedModel(model, ParallelConfig(), CacheConfig(), 200)
    a = single.sequence(PROMPT, 0, True, block_ids=[0, 5, 2, 3, 4])
    b = single.sequence(other, 0, True, block_ids=[7, 8], name="other")
    alone = [single.step([a])[0].token_id, single.step([b])[0].token_id]
    together = ShardedModel(model, ParallelConfig(), CacheConfig(), 200).step([a, b])
    assert token_ids(together) == alone


def damage_by_a_lost_block(architecture: str, layer: int, position: int) -> tuple[bool, float]:
    """Whether the tokens change, and the largest change of a log-probability."""
    config = ModelConfig(architecture=architecture)
    prompt = [random.Random(3).randrange(config.vocab_size) for _ in range(300)]
    model = ShardedModel(config, ParallelConfig(), CacheConfig(), 320)

    def lose_block(block_ids: list[int]) -> None:
        cache = model.stages[0].cache
        lost = position // cache.groups[cache.group_of[layer]].block_size
        for part in cache.parts[layer]:
            part[block_ids[lost]] = 0.0

    expected = model.generate(prompt, 12)
    damaged = model.generate(prompt, 12, after_prefill=lose_block)
    differences = [abs(a.logprob - b.logprob) for a, b in zip(damaged, expected, strict=True)]
    return token_ids(damaged) != token_ids(expected), max(differences)


@pytest.mark.parametrize(
    "architecture,layer,position",
    [
        *itertools.product(["llama", "mla"], [0, 4, 7], [0, 31, 100, 299]),
        ("hybrid", 0, 0),
        ("hybrid", 7, 250),
        ("mamba", 7, 299),
    ],
)
def test_a_lost_block_of_one_layer_is_noticed(architecture: str, layer: int, position: int) -> None:
    """Otherwise comparing two engines' completions would prove nothing about the cache in between."""
    differs, largest = damage_by_a_lost_block(architecture, layer, position)
    assert differs or largest > LOGPROB_TOLERANCE


@given(num_kv_heads=st.integers(1, 8), group=st.integers(1, 8), tp_size=st.integers(1, 16))
def test_query_heads_are_shared_out_exactly_once(
    num_kv_heads: int, group: int, tp_size: int
) -> None:
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


def test_weights_from_a_file_are_used_and_checked(tmp_path: Path) -> None:
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
