"""DeepSeek-V4's caches: their groups, and a prompt's rows between two engines, by vLLM's own planner and managers."""

import time
from fractions import Fraction

import pytest
import torch
from vllm.utils.math_utils import cdiv
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvconnector.errors import GeometryError
from kvconnector.integrations.vllm.caches import register_groups
from tests.unit import test_sparse_bytes as sizes
from tests.vllm import scheduler_world as w
from tests.vllm.cache_world import attention, placed, read, registered, vllm_config
from tests.vllm.compressed_world import RATIOS, pair, planned, specs_of
from tests.vllm.harness import rows
from tests.vllm.harness.digests import difference

pytestmark = pytest.mark.vllm

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def engines(model):
    with pair(model, specs_of(RATIOS)) as made:
        yield made


def test_groups_are_the_same_in_every_release(engines):
    """By kind of row: what a layer is called and stores, not how a release describes it."""
    found = []
    for group in engines.p.worker._groups:
        info, geometry = group.info, group.cache.geometry
        sizes = geometry.row_tokens, geometry.block_size
        parts = tuple(part.head_dim * part.item_size_bytes for part in geometry.parts)
        found.append((info.keeps, info.extent_tokens, sizes, geometry.layers, parts))
    assert found == [
        ("window", 128, (1, 64), (0, 3), (576, 8)),
        ("window", 128, (1, 64), (1, 4), (576, 8)),
        ("window", 128, (1, 64), (2, 5), (576, 8)),
        ("all", 0, (4, 64), (2, 4), (576, 8)),
        ("all", 0, (128, 2), (1, 3), (576, 8)),
        ("all", 0, (4, 64), (2, 4), (128, 4)),
        ("chunk", 128, (1, 8), (1, 3), (4096,)),
        ("window", 8, (1, 4), (2, 4), (8192,)),
        ("window", 8, (1, 4), (2, 4), (2048,)),
    ]


def loaded(engines, wanted):
    """Step both engines until the request has a token."""
    until_s = time.monotonic() + DEADLINE_S
    while not wanted.num_output_tokens:
        engines.d.step(), engines.p.step()
        assert time.monotonic() < until_s, wanted
        time.sleep(0.001)


def offered(prefill, num_tokens, prompt):
    """Compute a prompt. Returns its request, and the parameters for the decode engine."""
    asked = prefill.world.add(num_tokens, w.REMOTE_DECODE, prompt=prompt)
    while True:
        for output in prefill.step():
            if output.kv_transfer_params:
                return asked, output.kv_transfer_params


def check(engines, asked, wanted, before, **options):
    """Compare all bytes of the decode engine: of the prompt's rows with the prefill engine's, of others with `before`;
    those beside them in a block are zero, since a recycled block's scales may read as NaN.
    """
    expected, count = before, wanted.num_prompt_tokens - 1
    ours, beside = engines.d.rows_of(wanted.request_id, count, expected, **options)
    theirs, _ = engines.p.rows_of(asked.request_id, count, **options)
    for row, arrived in zip(ours, theirs, strict=True):
        row[:] = arrived
    for row in beside:
        row[:] = 0
    assert (engines.d.memory == expected).all()


@pytest.mark.parametrize("num_tokens", [5, 127, 128, 129, 300, 1000, 1024, 1025])
def test_every_row_of_a_prompt_arrives_and_nothing_else(engines, num_tokens):
    asked, params = offered(engines.p, num_tokens, num_tokens)
    before = engines.d.memory.copy()
    wanted = engines.d.world.add(num_tokens, params, prompt=num_tokens)
    loaded(engines, wanted)
    check(engines, asked, wanted, before)


@pytest.mark.parametrize("options", [{"packed": False}, {"index_bytes": 68}], ids=str)
def test_rows_of_bf16_and_keys_of_mxfp4_arrive(model, options):
    with pair(model, specs_of(RATIOS, **options)) as engines:
        for num_tokens in (5, 128, 1000, 1025):
            asked, params = offered(engines.p, num_tokens, num_tokens)
            before = engines.d.memory.copy()
            wanted = engines.d.world.add(num_tokens, params, prompt=num_tokens)
            loaded(engines, wanted)
            check(engines, asked, wanted, before)


def test_rows_arrive_where_drafts_take_blocks_ahead(model):
    """With a layer more, as of DeepSeek-V4's MTP, which has a window alone, and blocks for drafts behind the prompt."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with pair(model, specs_of((*RATIOS, 0)), speculative_config=drafts) as engines:
        windows = [group for group in engines.p.worker._groups if group.info.extent_tokens == 128]
        assert any(6 in group.cache.geometry.layers for group in windows)
        for num_tokens in (5, 128, 1000, 1024):
            asked, params = offered(engines.p, num_tokens, num_tokens)
            before = engines.d.memory.copy()
            wanted = engines.d.world.add(num_tokens, params, prompt=num_tokens)
            loaded(engines, wanted)
            check(engines, asked, wanted, before)


def test_an_offer_names_each_block_table_once(engines):
    """Rows of 4 and of 128 tokens and the indexer's are in one table of vLLM's; so are both compressors' states."""
    asked, params = offered(engines.p, 300, 5000)
    infos = [group.info for group in engines.p.worker._groups]
    lists = params["remote_block_ids"]
    assert len(lists) == len({info.vllm_group for info in infos}) < len(infos)
    numbers = [int(each) for each in params["remote_request_id"].rpartition("|")[2].split(",")]
    firsts, of_groups = numbers[: len(infos)], numbers[len(infos) :]
    for info, first, number in zip(infos, firsts, of_groups, strict=True):
        table = engines.p.tables[asked.request_id][info.vllm_group]
        assert lists[number] == list(table[first:])
    # free its blocks
    wanted = engines.d.world.add(300, params, prompt=5000)
    loaded(engines, wanted)


def test_cases_compare_every_row_that_is_read(engines, monkeypatch):
    """What the cases on GPUs compare are the rows that a load brings, and what they clear are those of one cache."""
    asked, params = offered(engines.p, 1000, 7000)
    wanted = engines.d.world.add(1000, params, prompt=7000)
    found, digests = [], rows.RowDigests()
    for engine, request in ((engines.p, asked), (engines.d, wanted)):
        monkeypatch.setattr(rows, "_groups", lambda engine=engine: engine.worker._groups)
        if engine is engines.d:
            loaded(engines, wanted)
        found.append(digests.cache_digests(engine.tables[request.request_id], 0, 999))
    assert difference(*found) == ""
    planes = sum(map(len, found[0].values()))
    assert planes == len(engines.p.rows_of(asked.request_id, 999, is_followed=True)[0])
    for number, kind in enumerate(digests.kinds()):
        before = engines.d.memory.copy()
        assert digests.spoil(engines.d.tables[wanted.request_id], 999, number), kind
        after = digests.cache_digests(engines.d.tables[wanted.request_id], 0, 999)
        changed = {key for key in after if after[key] != found[1][key]}
        assert changed == {key for key in after if key[0] == number}, kind
        engines.d.memory[:] = before


PUBLISHED = {
    "Pro": (128, *(128, 4) * 30),
    "Flash": (0, 0, *(4, 128) * 20, 4),
}
"""Rows of each layer, as the models' `config.json`s have them."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_whole_blocks_of_the_planner_are_those_of_the_table_of_bytes(model, name):
    """A table in docs compares with NixlConnector, which reads whole blocks of the pool: of a window those in which
    tokens of it are. The unit test of its table has these sizes as constants.
    """
    made = planned(
        w.vllm_config(model, engine={"max_model_len": 4096}), specs_of(PUBLISHED[name]), 8
    )
    (tensor_bytes,) = {tensor.size for tensor in made.kv_cache_tensors}
    assert tensor_bytes // made.num_blocks == sizes.BLOCK_BYTES[name]
    specs = [
        group.kv_cache_spec
        for group in kv_cache_utils.generate_scheduler_kv_cache_config([made]).kv_cache_groups
    ]
    found = [(spec.block_size, getattr(spec, "sliding_window", None) or 0) for spec in specs]
    assert sorted(found) == sorted(sizes.GROUPS)
    for num_tokens in (1000, 8192, 65536):
        blocks = 0
        for spec in specs:
            held = cdiv(num_tokens, spec.block_size)
            if isinstance(spec, kv.SlidingWindowSpec):
                held -= max(0, num_tokens - spec.sliding_window) // spec.block_size
            blocks += held
        assert blocks == sizes.whole_blocks(num_tokens)


@pytest.mark.parametrize("num_tokens", [130, 1025])
def test_rows_are_read_while_the_prompt_is_computed(engines, num_tokens):
    """Whole rows of 4 and of 128 tokens with each step; windows and states come with the end."""
    _, params = offered(engines.p, 5, 2000 + num_tokens)
    where = {key: params[key] for key in ("remote_engine_id", "remote_host", "remote_port")}
    name = {"transfer_id": f"t{num_tokens}", "transfer_secret": w.SECRET}
    asked = engines.p.world.add(num_tokens, {**w.REMOTE_DECODE, **name}, prompt=3000)
    before = engines.d.memory.copy()
    wanted = engines.d.world.add(
        num_tokens, {"do_remote_prefill": True, **where, **name}, prompt=3000
    )
    loaded(engines, wanted)
    check(engines, asked, wanted, before, is_followed=True)


def test_only_rows_after_a_prefix_hit_are_read(engines):
    """A hit ends where rows of every length do."""
    for num_tokens, hit in ((1025, 0), (1290, 1024)):
        asked, params = offered(engines.p, num_tokens, 4000)
        before = engines.d.memory.copy()
        wanted = engines.d.world.add(num_tokens, params, prompt=4000)
        loaded(engines, wanted)
        check(engines, asked, wanted, before, hit=hit)
        while wanted.request_id in engines.d.world.scheduler.requests:
            engines.d.step()


def test_unpacked_rows_are_elements(model):
    """In bf16 all rows but the indexer's are rows of elements."""
    layers = specs_of(RATIOS, packed=False)
    config = w.vllm_config(model, engine={"max_model_len": 4096})
    made = planned(config, layers, 8)
    caches = allocate_kv_cache(made, torch.device("cpu"), KVCacheLayout.BLHNC, None)
    backends = {name: backend for name, (_, backend) in layers.items()}
    groups = register_groups(vllm_config(backends, names=list(layers)), made, caches, placed())
    widths = {
        tuple(part.head_dim * part.item_size_bytes for part in group.cache.geometry.parts)
        for group in groups
    }
    assert widths == {(1024,), (128, 4), (4096,), (8192,), (2048,)}


LATENT = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8, "state_content_bytes": 584}


@pytest.mark.parametrize(
    "spec, backend, text",
    [
        (
            attention(kv.MLAAttentionSpec, **LATENT, block_size=512, tokens_per_state=4),
            "FLASHMLA_SPARSE_DSV4",
            "repeat inside a block",
        ),
        (
            attention(
                kv.MLAAttentionSpec, **LATENT, block_size=256, tokens_per_state=Fraction(1, 2)
            ),
            "FLASHMLA_SPARSE_DSV4",
            "tokens_per_state='1/2'",
        ),
        (
            attention(kv.SlidingWindowMLASpec, **LATENT, block_size=128, sliding_window=128),
            "DEEPSEEK_SPARSE_SWA",
            "repeat inside a block",
        ),
        (
            attention(
                kv.MLAAttentionSpec,
                num_kv_heads=1,
                head_size=132,
                dtype=torch.uint8,
                block_size=512,
                tokens_per_state=4,
            ),
            "DEEPSEEK_V32_INDEXER",
            "repeat inside a block",
        ),
        (
            attention(kv.MLAAttentionSpec, **LATENT, block_size=64),
            "ROCM_FLASHMLA_SPARSE_DSV4",
            "ROCM",
        ),
    ],
)
def test_pages_that_are_not_known_are_refused_by_name(spec, backend, text):
    with pytest.raises(GeometryError, match=text):
        registered(spec, KVCacheLayout.BLHNC, backend)


def test_rings_move_whole():
    """A request has one block of recent tokens, each at its position modulo the ring's length."""
    ring = attention(kv.CircularBufferSpec, block_size=16, dcp_sharded=False)
    group, caches = registered(ring, KVCacheLayout.BLHNC, "GLM5NEXT_KPOOL_TAIL")
    geometry = group.cache.geometry
    assert (group.info.keeps, geometry.block_size, len(geometry.parts)) == ("state", 1, 1)
    (view,) = group.cache.views[1]
    page = caches["model.layers.1.self_attn.attn"][3].contiguous().view(torch.uint8).flatten()
    assert read(view)[3].flatten().tolist() == page.tolist()
