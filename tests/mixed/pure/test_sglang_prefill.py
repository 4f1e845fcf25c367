"""Engines of another kind read prompts of SGLang's prefill engines, under the names that follow from the room."""

import time
from array import array
from contextlib import ExitStack, closing
from types import SimpleNamespace

import pytest

from kvconnector.integrations.identity import GREEDY, PromptEnd, content_digest, digest_of
from kvconnector.integrations.sglang.digests import identity_of
from kvconnector.integrations.sglang.prompt_end import (
    MAX_WEIGHTS,
    SEVERAL_WEIGHTS,
    TOP_K_ALL,
    context_of,
    name_of_weights,
    prompt_end_of,
)
from kvconnector.integrations.sglang.transfers import Stage
from kvconnector.wire.messages import MAX_EXTRA_BYTES
from tests.mixed.pure.engines import DecodeEngine, NamedPools
from tests.sglang.pure.engines import DEADLINE_S, Engine
from tests.sglang.pure.engines import Pair as SglangPair
from tests.sglang.pure.pools import Model
from tests.support.ports import free_ports

PAGES, BLOCKS = [5, 2, 9, 3, 11, 7, 1, 14, 6, 4], [4, 1, 8, 3, 6]
TOKENS = 37


class Pair(SglangPair):
    """SGLang's prefill ranks, and a decode engine that is not SGLang's."""

    def __init__(self, model, prefill, decode):
        self.model, self._stack = model, ExitStack()
        try:
            options = {"is_prefill": True, "port": free_ports(), "pools": NamedPools, **prefill}
            self.prefill = self._stack.enter_context(closing(Engine(model, **options)))
            self.decode = self._stack.enter_context(closing(DecodeEngine(model, **decode)))
        except BaseException:
            self._stack.close()
            raise


CASES = {
    "as it is": (Model(), {}, {}),
    "smaller blocks": (Model(), {"page_size": 16}, {}),
    "larger blocks": (Model(), {}, {"block": 16}),
    "fewer ranks": (Model(), {"tp_size": 2}, {}),
    "more ranks": (Model(), {}, {"tp_size": 2, "block": 16}),
    "stages": (Model(), {"pp_size": 2}, {"tp_size": 2}),
    "a latent": (Model(latent=True), {"tp_size": 2}, {}),
    "a draft model there": (Model(draft=1), {}, {}),
}


@pytest.mark.ucx
@pytest.mark.parametrize("model, prefill, decode", [*CASES.values()], ids=[*CASES])
def test_a_prompt_arrives_with_what_is_said_at_its_end(model, prefill, decode):
    with closing(Pair(model, prefill, decode)) as pair:
        sent = pair.send(70)
        for each in sent:
            each.prompt_end = b"the end"
        pair.decode.want(70, pair.prefill)
        until_s = time.monotonic() + DEADLINE_S
        pair.compute(sent, PAGES, 0, 16)
        while pair.decode.scheduler.is_early("r70"):
            assert time.monotonic() < until_s
            pair.decode.step()
        pair.decode.load(70, BLOCKS, TOKENS)
        pair.compute(sent, PAGES, 16, TOKENS, is_last=True)
        while "r70" not in pair.decode.received:
            assert time.monotonic() < until_s
            pair.decode.step()
        assert not pair.decode.failed
        pair.decode.check(BLOCKS, TOKENS - 1)
        assert pair.decode.extras == {"r70": b"the end"}
        assert {*pair.until_over(*sent)} == {Stage.DONE}


def _request(**changes):
    greedy = {"temperature": 1.0, "top_p": 1.0, "top_k": 1, "min_p": 0.0}
    none = dict.fromkeys(
        ("json_schema", "regex", "ebnf", "structural_tag", "logit_bias", "custom_params")
    )
    params = {**greedy, **none, "repetition_penalty": 1.0, "min_new_tokens": 0}
    own = dict.fromkeys(
        ("lora_id", "cache_salt", "multimodal_inputs", "input_embeds", "custom_logit_processor")
    )
    return SimpleNamespace(
        origin_input_ids=changes.pop("prompt", [3, 5, 8]),
        output_ids=changes.pop("output_ids", [77]),
        **{name: changes.pop(name, value) for name, value in own.items()},
        sampling_params=SimpleNamespace(**{**params, **changes}),
    )


def _end_of(weights="", **changes):
    req = _request(**changes)
    context = context_of(req, adapter="a" * 600, namespace="0" * 16)
    identity = identity_of(req.origin_input_ids, context, req.input_embeds)
    return prompt_end_of(req, identity, weights)


@pytest.mark.parametrize("kind", [list, tuple, lambda tokens: array("q", tokens)])
def test_the_end_says_what_was_computed_and_the_greedy_token(kind):
    end = PromptEnd.decode(_end_of(prompt=kind([3, 5, 8])))
    assert (end.token, end.sampling_digest, end.num_tokens) == (77, GREEDY, 3)
    assert (end.identity.tokens_digest, end.identity.context) == (digest_of([3, 5, 8]), {})


@pytest.mark.parametrize(
    "changes",
    [
        {"json_schema": "{}"},
        {"logit_bias": {"3": 1.0}},
        {"min_new_tokens": 2},
        {"repetition_penalty": 1.1},
        {"custom_params": {"x": 1}},
        {"custom_logit_processor": "code"},
    ],
    ids=str,
)
def test_a_token_that_another_kind_may_not_use_is_not_sent(changes):
    end = PromptEnd.decode(_end_of(**changes))
    assert (end.token, end.num_tokens) == (None, 3)
    assert end.identity is not None


def test_a_sampled_token_has_the_digest_of_its_distribution():
    drawn = {"temperature": 0.7, "top_p": 0.9, "top_k": TOP_K_ALL}
    one, same, other = (
        PromptEnd.decode(_end_of(**drawn, min_p=min_p)).sampling_digest for min_p in (0.0, 0.0, 0.1)
    )
    assert one == same
    assert len({one, other, GREEDY}) == 3


IMAGE = SimpleNamespace(mm_items=[SimpleNamespace(modality=SimpleNamespace(name="IMAGE"), hash=7)])
DEPENDS = {"lora_id": "0" * 32, "cache_salt": "s", "multimodal_inputs": IMAGE}
DEPENDS["input_embeds"] = [[0.1]]


def test_what_a_cache_depends_on_besides_tokens_is_said_and_fits_into_a_report():
    for name, value in DEPENDS.items():
        assert len(PromptEnd.decode(_end_of(**{name: value})).identity.context) == 1
    weights = "v" * MAX_WEIGHTS
    end = _end_of(weights, **DEPENDS, prompt=range(1_000_000), output_ids=[1_000_000])
    assert PromptEnd.decode(end).identity.context.keys() == {"adapter", "salt", "media", "embeds"}
    assert len(end) <= MAX_EXTRA_BYTES
    without_salt = {name: value for name, value in DEPENDS.items() if name != "cache_salt"}
    end = _end_of(weights, **without_salt, prompt=range(1_000_000), output_ids=[1_000_000])
    assert PromptEnd.decode(end).weights == weights
    assert len(end) <= MAX_EXTRA_BYTES


def test_versions_of_weights_have_short_names_of_their_own():
    versions = ("default", "v" * MAX_WEIGHTS, "v" * 17, "w" * 17, "é", "\ud800")
    names = [name_of_weights([each]) for each in versions]
    assert len({*names}) == len(versions)
    assert max(map(len, names)) == MAX_WEIGHTS
    assert names[0] == "default"
    assert name_of_weights([]) == ""
    assert name_of_weights({"a", "b"}) == SEVERAL_WEIGHTS


def test_an_adapter_has_the_name_that_vllm_gives_it():
    """By that name it is compared between the two kinds of engine."""
    for name in ("sql", "\ud800", "x" * 600):
        context = context_of(_request(lora_id="0" * 32), adapter=name, namespace="")
        shown = name[:512].encode(errors="replace").decode()  # as `PromptContexts.of` makes it
        assert context == {"adapter": content_digest(shown.encode())}
    assert context_of(_request(lora_id="1"), adapter="", namespace="") == {"adapter": ""}
