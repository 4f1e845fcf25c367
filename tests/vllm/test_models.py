"""The caches of served models, moved between two engines by vLLM's own planner, allocator and block managers."""

import time

import pytest
from vllm.v1 import kv_cache_interface as kv

from tests.vllm import scheduler_world as w
from tests.vllm.compressed_world import pair
from tests.vllm.model_world import DRAFTING, MODELS, aligned, moved, qwen3_5_mtp

pytestmark = pytest.mark.vllm

DEADLINE_S = 60.0


def drafting(num_spec):
    """Return the options of an engine that looks drafts up in the prompt."""
    drafts = {"method": "ngram", "num_speculative_tokens": num_spec, "prompt_lookup_max": 2}
    return {"speculative_config": drafts} if num_spec else {}


@pytest.fixture(scope="module", params=MODELS)
def engines(request, model):
    layers = MODELS[request.param]()
    kinds = [spec for spec, _ in layers.values()]
    size = max(each.block_size for each in kinds if not isinstance(each, kv.MambaSpec))
    # without a prefix cache, states are not aligned to blocks; rings are in none
    caching = not any(isinstance(each, kv.MambaSpec | kv.CircularBufferSpec) for each in kinds)
    options = {"num_blocks": 128, "block_size": size, "enable_prefix_caching": caching}
    num_spec = max(getattr(each, "num_speculative_blocks", 0) for each in kinds)
    with pair(model, layers, **options, **drafting(num_spec)) as made:
        yield made


def offered(prefill, num_tokens):
    """Compute a prompt. Returns its request, and the parameters for the decode engine."""
    asked = prefill.world.add(num_tokens, w.REMOTE_DECODE, prompt=num_tokens, max_tokens=1)
    while True:
        for output in prefill.step():
            if output.kv_transfer_params:
                return asked, output.kv_transfer_params


def check(engines, num_tokens):
    """Load a prompt of the prefill engine, and compare all bytes of the decode engine. Those of a draft layer that the
    prefill engine lacks are zero.
    """
    asked, params = offered(engines.p, num_tokens)
    before = engines.d.memory.copy()
    wanted = engines.d.world.add(num_tokens, params, prompt=num_tokens)
    until_s = time.monotonic() + DEADLINE_S
    while not wanted.num_output_tokens:
        engines.d.step(), engines.p.step()
        assert time.monotonic() < until_s, wanted
        time.sleep(0.001)
    # with the first token, a model that keeps all of its tokens is loaded to the prompt's end
    count = params["remote_num_tokens"]
    lone = None if engines.p.layers.keys() == engines.d.layers.keys() else DRAFTING
    ours = moved(engines.d, wanted.request_id, count, without=lone)
    theirs = moved(engines.p, asked.request_id, count, without=lone)
    clears = engines.d.cache_config.needs_kv_cache_zeroing
    read = iter([each for each in theirs if each.is_read])
    for to in ours:
        source = next(read) if to.is_read else None
        if source is not None:
            before[to.where] = engines.p.memory[source.where]
        elif clears:
            before[to.where] = 0
    assert (engines.d.memory == before).all()


@pytest.mark.parametrize("num_tokens", [5, 129, 130, 700])
def test_a_part_of_a_models_pages_arrives_and_nothing_else(engines, num_tokens):
    check(engines, num_tokens)


@pytest.mark.parametrize(
    "num_spec, checkpoints, decode_spec",
    [(0, 0, 0), (3, 0, 3), (0, 1, 0), (3, 1, 3), (0, 0, 3), (3, 0, 0), (0, 1, 2)],
)
def test_states_that_are_cached_at_the_ends_of_blocks_arrive(
    model, num_spec, checkpoints, decode_spec
):
    """With prompts that end a block, begin one, or take several steps, and drafts in both engines or in one."""
    if checkpoints and not hasattr(kv.MambaSpec, "num_prefill_checkpoint_blocks"):
        pytest.skip("this release of vLLM has no checkpoints within a prompt")
    with pair(
        model,
        aligned(num_spec, checkpoints),
        decode_layers=aligned(decode_spec, checkpoints),
        decode={"speculative_config": None, **drafting(decode_spec)},
        num_blocks=96,
        block_size=560,
        enable_prefix_caching=True,
        max_num_batched_tokens=1120,
        **drafting(num_spec),
    ) as engines:
        for num_tokens in (5, 300, 560, 561, 1120, 1121, 1400):
            check(engines, num_tokens)


@pytest.mark.parametrize("num_tokens", [5, 560, 700])
@pytest.mark.parametrize("who_drafts", ["decode engine", "prefill engine", "both"])
def test_an_engine_may_lack_the_draft_layers_of_the_other_one(model, who_drafts, num_tokens):
    """Its own layers and states arrive, whether or not the other one keeps more for drafts."""
    drafts = [2 * (who_drafts in (each, "both")) for each in ("prefill engine", "decode engine")]
    prefill, decode = (qwen3_5_mtp(each, has_mtp=bool(each)) for each in drafts)
    options = {"num_blocks": 96, "block_size": 560, "enable_prefix_caching": False}
    with pair(
        model,
        prefill,
        decode_layers=decode,
        decode={"speculative_config": None, **drafting(drafts[1])},
        **options,
        **drafting(drafts[0]),
    ) as engines:
        check(engines, num_tokens)


@pytest.mark.parametrize(
    "whose, reason",
    [("prefill", "a different number of cache groups"), ("decode", "they differ in cache_groups")],
)
def test_engines_of_which_one_keeps_windows_whole_refuse_each_other(model, caplog, whose, reason):
    off = {"disable_hybrid_kv_cache_manager": whose == "prefill"}
    decode = {"disable_hybrid_kv_cache_manager": whose == "decode"}
    layers = MODELS["gpt-oss"]()
    with pair(model, layers, decode=decode, enable_prefix_caching=False, **off) as engines:
        _, params = offered(engines.p, 300)
        wanted = engines.d.world.add(300, params, prompt=300)
        until_s = time.monotonic() + DEADLINE_S
        while reason not in caplog.text:
            engines.d.step(), engines.p.step()
            assert time.monotonic() < until_s, wanted
            time.sleep(0.001)
