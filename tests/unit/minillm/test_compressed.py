"""Compressed attention: equal to one without a cache, and a wrong cache of any kind shows in the tokens."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from minillm.attention import Rotary, StepContext
from minillm.batch import Batch
from minillm.cache_groups import CACHED_KINDS, cache_name, layer_groups, rank_pool
from minillm.compressed_attention import CompressedAttention
from minillm.config import CacheConfig, EngineConfig, MixerConfig, ModelConfig, ParallelConfig
from minillm.demo import LOGPROB_TOLERANCE
from minillm.messages import NewRequest, SequenceInput, TableChanges
from minillm.paged_cache import PagedCache
from minillm.partition import rank_share
from minillm.rank_tables import create_rank_tables
from minillm.weights import RankWeights
from tests.support.examples import examples
from tests.support.local_engines import generate, generated, prompt_of, token_ids
from tests.unit.minillm.seed_cases import model_of

SMALL = ModelConfig(
    architecture="compressed",
    hidden_size=32,
    num_layers=2,
    num_heads=3,
    head_dim=8,
    mixer=MixerConfig(
        latent_rank=6, rope_dim=4, sliding_window=5, coarse_tokens=6, index_dim=4, index_rows=2
    ),
)


def naive(mixer, x_TE, rotary):
    """Attend token by token, each row from its tokens' inputs, with nothing kept between tokens."""
    config = mixer.config
    m, dim, settings = mixer.row_tokens, config.cache_dim, config.mixer
    positions = torch.arange(len(x_TE))
    latents = mixer.latents(F.linear(x_TE, mixer.kv_a), positions, rotary)[:, 0]
    inputs, queries = F.linear(x_TE, mixer.inputs), mixer.queries(x_TE, positions, rotary)
    out = []
    for token in range(len(x_TE)):
        seen = list(latents[max(0, token - settings.sliding_window + 1) : token + 1])
        rows, keys = [], []
        for row in range((token + 1) // m):
            stop = (row + 1) * m
            places = [(place, stop - mixer.span + place) for place in range(mixer.span)]
            places = [(place, at) for place, at in places if at >= 0]
            scores = [inputs[at, -1] + mixer.place_weights[place] for place, at in places]
            weights = torch.stack(scores).softmax(0)
            pooled = sum(w * inputs[at] for w, (_, at) in zip(weights, places, strict=True))
            start = torch.tensor([row * m])
            rows.append(mixer.latents(pooled[None, :dim], start, rotary)[0, 0])
            keys.append(pooled[dim:-1])
        chosen = range(len(rows))
        if mixer.is_fine and len(rows) > settings.index_rows:
            query = mixer.index_q @ x_TE[token]
            chosen = sorted(chosen, key=lambda row: -(query @ keys[row]))[: settings.index_rows]
        seen = torch.stack([*seen, *(rows[row] for row in chosen)])
        scores = torch.einsum("hc,lc->hl", queries[token], seen) * mixer.scale
        out.append(scores.softmax(1) @ seen)
    return mixer.out(torch.stack(out))


@examples(40)
@given(
    layer=st.sampled_from([0, 1]),
    block_size=st.sampled_from([1, 3, 8]),
    cuts=st.sets(st.integers(1, 39), max_size=4),
    length=st.integers(1, 40),
    others=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_steps_of_any_length_equal_attention_without_a_cache(
    *, layer, block_size, cuts, length, others, seed
):
    """A prompt is computed in steps, beside other sequences, in shuffled blocks that hold something else at first."""
    share = rank_share(SMALL, ParallelConfig(), 0)
    shape = CacheConfig(block_size=block_size)
    engine = EngineConfig(role="mono", engine_id="e", model=SMALL, cache=shape)
    groups, generator = layer_groups(SMALL, shape), torch.Generator().manual_seed(seed)
    num_blocks = (1 + others) * (40 // block_size + 1)
    pools = [rank_pool(engine, share, pool, num_blocks) for pool in range(len(groups))]
    cache = PagedCache(share, groups, pools, layout="NHD", device="cpu")
    for part in (part for parts in cache.parts.values() for part in parts):
        part.fill_(torch.nan)
    mixer = CompressedAttention(RankWeights(SMALL, share, "cpu"), layer)
    rotary = Rotary(SMALL.mixer.rope_dim, 64, SMALL.rope_theta, "cpu")
    sizes = {"max_rows": 3, "max_model_len": 64, "max_batched_tokens": 200}
    tables = create_rank_tables("host", groups, device="cpu", **sizes)
    names = [f"r{number}" for number in range(1 + others)]
    blocks = {name: [] for name in names}
    for group in groups:
        ids = torch.randperm(num_blocks, generator=generator).tolist()
        size = 40 // (block_size * group.row_tokens) + 1
        for number, name in enumerate(names):
            blocks[name].append(ids[number * size : (number + 1) * size])
    changes = TableChanges()
    changes.scheduled_new_reqs.extend(NewRequest(name, blocks[name]) for name in names)
    tables.update(changes)
    x = {name: torch.randn(length, SMALL.hidden_size, generator=generator) for name in names}
    found = {name: [] for name in names}
    edges = sorted({0, length, *(cut for cut in cuts if cut < length)})
    for start, stop in pairwise(edges):
        inputs = [SequenceInput(name, [0] * (stop - start), start, 0) for name in names]
        batch = Batch.build(inputs, groups, tables)
        step = torch.cat([x[name][start:stop] for name in names])
        out = mixer(step, StepContext(batch, cache, rotary, None, step[:0]))
        for name, rows in zip(names, out.split(stop - start), strict=True):
            found[name].append(rows)
    for name in names:
        expected = naive(mixer, x[name], rotary)
        torch.testing.assert_close(torch.cat(found[name]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fine,coarse", [(1, 3), (4, 128), (7, 16)])
def test_rows_of_any_length_do_not_depend_on_blocks_and_chunks(fine, coarse):
    base = model_of("compressed")
    mixer = replace(base.mixer, fine_tokens=fine, coarse_tokens=coarse)
    model, prompt = replace(base, mixer=mixer), prompt_of(140)
    expected = token_ids(generate(model, prompt, 8))
    for block_size, chunk in ((1, 75), (7, 10), (64, 33)):
        shape = {"block_size": block_size, "max_batched_tokens": chunk}
        assert token_ids(generate(model, prompt, 8, **shape)) == expected
    others = replace(mixer, fine_tokens=fine + 1), replace(mixer, coarse_tokens=coarse + 1)
    for other in others:
        assert token_ids(generate(replace(base, mixer=other), prompt, 8)) != expected or coarse > 99


@pytest.mark.parametrize(
    "layer,kind",
    [(layer, kind) for layer in (0, 7) for kind in CACHED_KINDS[("fine", "coarse")[layer % 2]]],
)
def test_a_lost_cache_of_one_kind_shows_in_the_tokens(layer, kind):
    """A prompt of 301 tokens is inside a row of either length, which its compressor's inputs close later."""
    config, prompt = ModelConfig(architecture="compressed"), prompt_of(301)

    def lose(engine):
        for part in engine.rank.cache.parts[cache_name(layer, kind)]:
            part.zero_()

    expected = generated(config, tuple(prompt), 24)
    damaged = generate(config, prompt, 24, after_prefill=lose)
    differences = [abs(a.logprob - b.logprob) for a, b in zip(damaged, expected, strict=True)]
    assert token_ids(damaged) != token_ids(expected) or max(differences) > LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    "layer,kind", [(0, "latents"), (0, "fine_compressor"), (1, "coarse_compressor")]
)
def test_one_wrong_state_is_a_wrong_token(layer, kind):
    """Of the prompt's last token alone: its row closes within the 48 tokens that follow."""
    config, prompt = ModelConfig(architecture="compressed"), prompt_of(301)
    last = len(prompt) - 1

    def lose(engine):
        cache, name = engine.rank.cache, cache_name(layer, kind)
        group = cache.group_of[name]
        size = cache.groups[group].kernel_block_rows
        block = engine.scheduler.blocks.tables("r")[group][last // size]
        (part,) = cache.parts[name]
        assert part[block, :, last % size].any()
        part[block, :, last % size] = 0

    damaged = generate(config, prompt, 48, after_prefill=lose)
    assert token_ids(damaged) != token_ids(generated(config, tuple(prompt), 48))
