"""Which tokens of an offer are a request's own. A later turn of a chat reads the earlier ones from the decode engine,
if its prompt begins with their tokens.
"""

from types import SimpleNamespace

import pytest
import torch
from vllm.config.multimodal import MultiModalConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from kvconnector.integrations.identity import context_differences
from kvconnector.integrations.vllm import scheduler
from kvconnector.integrations.vllm.params import PREFIXES, media_namespace
from tests.vllm import scheduler_world as w
from tests.vllm.cache_world import attention

pytestmark = pytest.mark.vllm


@pytest.mark.parametrize("offered, is_loaded", [(63, False), (64, True)])
def test_a_prefill_engine_computes_few_tokens_itself(world, offered, is_loaded):
    prefill = world(role="kv_producer", bidirectional_kv_xfer=True, kv_recompute_threshold=64)
    prefill.add(200, w.offer(offered, **w.REMOTE_DECODE))
    news, outputs = prefill.step()
    assert (len(news.loads), len(outputs)) == (is_loaded, not is_loaded)


@pytest.mark.parametrize("kept", [slice(104), slice(103), slice(30), slice(1, None)])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_no_prompt_is_continued_from_the_cache_of_other_tokens(world, role, kept, caplog):
    """Templates leave reasoning out of earlier answers, and routers may confuse requests: lengths do not show it."""
    caplog.set_level("INFO", "kvconnector")
    first = world(bidirectional_kv_xfer=True, role="kv_both")
    earlier = first.add(100, {"do_remote_prefill": False}, max_tokens=5)
    outputs = []
    while not earlier.is_finished():
        outputs += first.step()[1]
    params = {**outputs[-1].kv_transfer_params, **w.REMOTE_DECODE}
    if role == "kv_consumer":
        params["do_remote_prefill"], params["do_remote_decode"] = True, False
    second = world(role=role, bidirectional_kv_xfer=True)
    tokens = list(earlier.all_token_ids)[kept]
    second.add(0, params, forms={"prompt_token_ids": tokens + [8] * (150 - len(tokens))})
    news, outputs = second.step()
    # all 104 are in the cache, or the prompt's 100 at whose end there is a digest
    loaded = {104: [((0, 104),)], 103: [((0, 100),)]}.get(kept.stop, [])
    assert [load.token_ranges for load in news.loads] == loaded
    assert bool(outputs) is not bool(loaded)
    assert news.dropped == ([] if loaded else ["r1"])
    assert ("does not offer the first tokens" in caplog.text) is not bool(loaded)


@pytest.mark.parametrize(
    "same, loaded", [(100, 100), (99, 99), (98, 96), (90, 84), (50, 36), (35, 0)]
)
def test_a_turn_whose_answer_was_rewritten_loads_what_is_unchanged(world, same, loaded):
    """As with templates that drop reasoning, of which a prompt may end with the beginning."""
    first = world(bidirectional_kv_xfer=True, role="kv_both")
    earlier = first.add(100, {"do_remote_prefill": False}, max_tokens=5)
    outputs = []
    while not earlier.is_finished():
        outputs += first.step()[1]
    params = {**outputs[-1].kv_transfer_params, **w.REMOTE_DECODE}
    prefill = world(role="kv_producer", bidirectional_kv_xfer=True, kv_recompute_threshold=1)
    tokens = list(earlier.all_token_ids)[:same] + [8] * 60
    prefill.add(0, params, forms={"prompt_token_ids": tokens})
    news, _ = prefill.step()
    assert [load.token_ranges for load in news.loads] == ([((0, loaded),)] if loaded else [])
    for load in news.loads:  # the producer recognises the blocks that it holds
        held = outputs[-1].kv_transfer_params["remote_block_ids"]
        assert [each.block_ids.tolist() for each in load.remote_blocks] == held


@pytest.mark.parametrize("opening", [[], [21, 22], [21, 22, 23]])
def test_every_turn_of_a_chat_without_its_reasoning_loads_what_is_unchanged(world, opening):
    """Twelve turns after the first. The template ends each prompt with `opening`, and leaves it and the reasoning out
    of earlier answers, so no prompt begins with all tokens of the decode engine's cache.
    """
    decode = world(bidirectional_kv_xfer=True)
    history, params, loaded, unchanged = [1, 2, 3], {}, [], 0
    for turn in range(13):
        history += [100 + turn] * 24  # the user's message, and the header of the answer
        # another prefill engine each time, which has nothing of its own
        prefill = world(role="kv_producer", bidirectional_kv_xfer=True, kv_recompute_threshold=1)
        forms = {"prompt_token_ids": history + opening}
        request = prefill.add(0, {**params, **w.REMOTE_DECODE}, forms=forms, max_tokens=1)
        news, outputs = prefill.step()
        loaded += [load.token_ranges for load in news.loads]
        if news.loads:
            prefill.step(finished_recving={request.request_id})
        while not outputs:
            outputs = prefill.step()[1]
        answered = decode.add(
            0, outputs[-1].kv_transfer_params, forms=forms, max_tokens=12, min_tokens=12
        )
        decode.step()
        outputs = decode.step(finished_recving={answered.request_id})[1]
        while not answered.is_finished():
            outputs = decode.step()[1]
        params = outputs[-1].kv_transfer_params
        if turn:
            first, reached = loaded[-1][0]
            assert (len(loaded), first) == (turn, 0)
            # at most 3 tokens less than were in common with the turn before
            assert unchanged - 3 <= reached <= unchanged
        unchanged = len(history)
        history += answered.output_token_ids[-4:]  # the answer without its reasoning
    assert len(loaded) == 12


def test_a_turn_of_a_model_with_windows_loads_whole_or_not_at_all(world):
    """Of the tokens before an answer the decode engine has no window any more."""
    specs = [attention(), attention(SlidingWindowSpec, sliding_window=48)]
    first = world(bidirectional_kv_xfer=True, role="kv_both", specs=specs)
    earlier = first.add(100, {"do_remote_prefill": False}, max_tokens=5)
    outputs = []
    while not earlier.is_finished():
        outputs += first.step()[1]
    assert PREFIXES not in outputs[-1].kv_transfer_params


def image(name, offset, length=10):
    position = PlaceholderRange(offset=offset, length=length)
    return MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=position)


def prefilled(engine, forms):
    """Return the output of a prompt that is computed with these arguments of `Request`."""
    rest = {name: value for name, value in forms.items() if name != "mm_features"}
    request = engine.add_with(100, dict(w.REMOTE_DECODE), prompt=1, max_tokens=1, **rest)
    planned = engine.scheduler.schedule()
    # without a vision encoder vLLM plans no step of a prompt with images
    request.mm_features = forms.get("mm_features", [])
    (output,) = engine.complete(planned)
    return output


ADAPTERS = [LoRARequest(name, number, "/nowhere") for number, name in enumerate("AB", start=1)]
BASE = {}
OTHERS = {
    "an adapter": ({"lora_request": ADAPTERS[0]}, {"lora_request": ADAPTERS[1]}, "adapter"),
    "no adapter": ({"lora_request": ADAPTERS[0]}, BASE, "adapter"),
    "a cache salt": ({"cache_salt": "a"}, {"cache_salt": "b"}, "cache salt"),
    "an image": ({"mm_features": [image("x", 8)]}, {"mm_features": [image("y", 8)]}, "images"),
    "its place": ({"mm_features": [image("x", 8)]}, {"mm_features": [image("x", 9)]}, "images"),
    "no image": ({"mm_features": [image("x", 8)]}, BASE, "images"),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("is_mixed_up", [False, True])
def test_a_cache_of_another_context_is_not_loaded(world, caplog, monkeypatch, case, is_mixed_up):
    """Its tokens are equal: a router may mix up two requests that have the same placeholders."""
    caplog.set_level("INFO", "kvconnector")
    monkeypatch.setattr(scheduler, "media_namespace", lambda config: "namespace")
    computed, other, word = OTHERS[case]
    prefill, decode = world(role="kv_producer"), world()
    output = prefilled(prefill, computed)
    decode.add_with(
        100, output.kv_transfer_params, prompt=1, **(other if is_mixed_up else computed)
    )
    planned = decode.scheduler.schedule()
    assert bool(decode.news(planned).loads) is not is_mixed_up
    assert (word in caplog.text) is is_mixed_up


def test_media_that_two_engines_name_differently_are_not_compared(world, monkeypatch):
    """Names contain the model's path, which may differ between hosts."""
    names = iter("pd")
    monkeypatch.setattr(scheduler, "media_namespace", lambda config: next(names))
    prefill, decode = world(role="kv_producer"), world()
    output = prefilled(prefill, {"mm_features": [image("x", 8)]})
    decode.add_with(100, output.kv_transfer_params, prompt=1, mm_features=[image("y", 8)])
    assert len(decode.news(decode.scheduler.schedule()).loads) == 1


def test_media_have_one_namespace_where_vllm_names_them_alike():
    def config(model="m", prefix_caching=True, cache_gb=4.0, **options):
        media = MultiModalConfig(mm_processor_cache_gb=cache_gb, mm_processor_kwargs=options)
        return SimpleNamespace(
            model_config=SimpleNamespace(model=model, multimodal_config=media),
            cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
        )

    assert media_namespace(config()) == media_namespace(config(prefix_caching=False)) != ""
    assert media_namespace(config(model="/elsewhere/m")) != media_namespace(config())
    assert media_namespace(config(max_pixels=9)) != media_namespace(config())
    assert media_namespace(config(prefix_caching=False, cache_gb=0)) == ""
    text = SimpleNamespace(model_config=SimpleNamespace(multimodal_config=None))
    assert media_namespace(text) == ""


def test_an_offer_without_a_context_is_loaded_and_the_log_says_so_once(world, caplog):
    """Of an earlier release, or through a router that drops the key."""
    caplog.set_level("INFO", "kvconnector")
    decode = world()
    for number in range(2):
        decode.add_with(100, w.offer(100, remote_request_id=f"{number}"), cache_salt="a")
    assert len(decode.step()[0].loads) == 2
    assert caplog.text.count("without a comparison of these") == 1


def test_embeddings_are_compared_by_content(world):
    prefill, decode = world(role="kv_producer"), world()
    rows = torch.arange(800.0).view(100, 8)
    prefill.add_with(
        100, dict(w.REMOTE_DECODE), forms={"prompt_token_ids": None, "prompt_embeds": rows}
    )
    request = prefill.scheduler.requests["r1"]
    contexts = prefill.connector._scheduler._contexts
    assert contexts.of(request, 100) == contexts.of(request, 100)
    assert contexts.of(request, 99) != contexts.of(request, 100)
    other = decode.add_with(100, None, forms={"prompt_token_ids": None, "prompt_embeds": rows + 1})
    assert context_differences(contexts.of(request, 100), contexts.of(other, 100)) == ["embeddings"]
