"""Prompts, windows and states arrive between engines of any shapes, by real workers."""

from contextlib import closing, nullcontext
from dataclasses import replace

import msgspec
import pytest

from kvconnector.errors import IncompatiblePeerError, OtherPromptError
from kvconnector.integrations.identity import Identity, PromptEnd, digest_of
from kvconnector.integrations.sglang.prompt_end import name_of_weights
from kvconnector.integrations.sglang.transfers import Stage
from tests.sglang.pure.engines import Pair, error_of
from tests.sglang.pure.pools import Model, Pools

pytestmark = pytest.mark.ucx

LONG, PREFILL_PAGES = 37, [5, 2, 9, 3, 11, 7, 1, 14, 6, 4]
DECODE_PAGES = [8, 3, 12, 6, 1, 10, 2, 15, 9, 13]

CASES = {
    "as it is": (Model(), {}, {}),
    "larger pages": (Model(), {}, {"page_size": 16}),
    "smaller pages": (Model(), {"page_size": 16}, {}),
    "more ranks": (Model(), {}, {"tp_size": 2}),
    "fewer ranks": (Model(), {"tp_size": 2}, {"page_size": 8}),
    "two ranks to three": (Model(heads=6), {"tp_size": 2}, {"tp_size": 3}),
    "replicated heads": (Model(heads=2), {"tp_size": 4}, {"tp_size": 2}),
    "stages to one": (Model(), {"pp_size": 2}, {}),
    "one to stages": (Model(), {}, {"pp_size": 2, "page_size": 8}),
    "stages to ranks": (Model(), {"pp_size": 2}, {"tp_size": 2}),
    "a latent": (Model(latent=True), {"tp_size": 2}, {"page_size": 8}),
    "a draft model": (Model(draft=1), {}, {"tp_size": 2}),
    "a draft model at the decode engine only": (Model(draft=1), {"draft": 0}, {"page_size": 8}),
    "a draft model at two decode ranks only": (Model(draft=1), {"draft": 0}, {"tp_size": 2}),
    "a draft model at the prefill engine only": (Model(draft=1), {}, {"draft": 0}),
    "a draft model of latents at the decode engine only": (
        Model(latent=True, draft=2),
        {"tp_size": 2, "draft": 0},
        {},
    ),
    "a draft model beside windows and states at the decode engine only": (
        Model(windows=(1,), states=(2,), window_tokens=9, draft=1),
        {"draft": 0},
        {"page_size": 8},
    ),
    "windows": (Model(windows=(1, 3), window_tokens=9), {}, {"page_size": 8}),
    "windows, larger pages": (
        Model(windows=(1, 3), window_tokens=9),
        {"page_size": 16},
        {"tp_size": 2},
    ),
    "states": (Model(states=(0, 2)), {}, {"tp_size": 2}),
    "states to three ranks": (Model(heads=6, states=(0, 2)), {"tp_size": 2}, {"tp_size": 3}),
    "states of stages": (Model(states=(0, 2)), {"pp_size": 2}, {}),
}


@pytest.fixture(params=[*CASES.values()], ids=[*CASES])
def pair(request):
    model, prefill, decode = request.param
    with closing(Pair(model, prefill=prefill, decode=decode)) as made:
        yield made


def test_a_draft_models_tokens_must_be_of_one_list():
    """A place in the prefill engine's list may be beyond the end of the decode engine's, which would then end."""

    class Named(Pools):
        def __init__(self, *args, is_prefill, **options):
            super().__init__(*args, is_prefill=is_prefill, **options)
            name = "draft_tokens" if is_prefill else "draft_tokens_of_map_0123abcd"
            self.shape = replace(self.shape, seed_element=name)

    engine = {"pools": Named}
    with closing(Pair(Model(draft=1), prefill=engine, decode=engine)) as pair:
        sent, wanted = pair.send(79), pair.want(79)
        pair.compute(sent, PREFILL_PAGES, 0, 20, is_last=True)
        pair.load(wanted, DECODE_PAGES, 20)
        assert {*pair.until_over(*wanted)} == {Stage.FAILED}
        refused = error_of(wanted[0])
        assert isinstance(refused, IncompatiblePeerError)
        assert "draft_tokens_of_map_0123abcd" in str(refused)
        sent[0].abort()


def test_a_stage_waits_for_its_steps_before_all_chunks_but_the_last(monkeypatch):
    """The last one is published once its step has ended, and the stream may have others queued by then."""
    with closing(Pair(Model())) as pair:
        waited, (rank,) = [], pair.prefill.ranks
        monkeypatch.setattr(rank, "after", lambda *events: waited.append(events) or nullcontext())
        (sent,) = pair.send(78)
        sent.stream, sent._early_send_wait_event = "steps", "event"
        pair.compute([sent], PREFILL_PAGES, 0, 16)
        pair.compute([sent], PREFILL_PAGES, 16, 20, is_last=True)
        assert waited == [("event", "steps"), (None, None)]
        sent.abort()
        assert pair.until_over(sent) == [Stage.FAILED]


def test_a_prompt_arrives_in_chunks_past_the_decode_engines_prefix(pair):
    size = pair.prefill.page_size
    prefix = pair.decode.page_size
    sent = pair.send(77)
    wanted = pair.want(77)
    for start in range(0, LONG, 16):
        stop = min(start + 16, LONG)
        assert stop == LONG or 16 % size == 0
        pair.compute(sent, PREFILL_PAGES, start, stop, is_last=stop == LONG)
        if start == 0:
            pair.load(wanted, DECODE_PAGES, LONG, prefix=prefix)
    assert {*pair.until_over(*sent, *wanted)} == {Stage.DONE}
    pair.check(DECODE_PAGES, LONG, prefix=prefix)
    for rank in (*pair.prefill.ranks, *pair.decode.ranks):
        assert not rank._transferring
        assert not rank._followed


def test_a_prompt_below_a_page_that_is_computed_before_it_is_wanted(pair):
    sent = pair.send(78)
    pair.compute(sent, PREFILL_PAGES, 0, 3, is_last=True)
    wanted = pair.want(78)
    pair.load(wanted, DECODE_PAGES, 3)
    assert {*pair.until_over(*sent, *wanted)} == {Stage.DONE}
    pair.check(DECODE_PAGES, 3)


def test_each_pass_shows_what_is_held_though_nothing_has_ended():
    with closing(Pair(Model())) as pair:
        (rank,), held = pair.prefill.ranks, []
        rank.stats.set_gauges = lambda: held.append(len(rank.held))
        sent = pair.send(80)
        pair.compute(sent, PREFILL_PAGES, 0, 3, is_last=True)
        for _ in range(2):
            sent[0].poll()
        assert held[-1] == 1
        wanted = pair.want(80)
        pair.load(wanted, DECODE_PAGES, 3)
        pair.until_over(*sent, *wanted)
        assert held[-1] == 0


@pytest.mark.parametrize("asleep", ["prefill", "decode"])
def test_a_request_that_comes_while_an_engine_has_no_memory_is_served_afterwards(asleep):
    with closing(Pair(Model())) as pair:
        ranks = getattr(pair, asleep).ranks
        for rank in ranks:
            rank.deregister_buffer_to_engine()
        sent, wanted = pair.send(79), pair.want(79)
        for rank in ranks:
            rank.register_buffer_to_engine()
        pair.compute(sent, PREFILL_PAGES, 0, 3, is_last=True)
        pair.load(wanted, DECODE_PAGES, 3)
        assert {*pair.until_over(*sent, *wanted)} == {Stage.DONE}
        pair.check(DECODE_PAGES, 3)


def test_seeds_of_an_earlier_request_do_not_reach_one_that_brings_none():
    with closing(Pair(Model(draft=1), prefill={"draft": 0})) as pair:
        for pools in pair.decode.pools:
            for tensor in pools.aux:
                tensor.fill_(9)
        for rank in pair.decode.ranks:
            rank.rows._mirror.fill_(9)
        sent, wanted = pair.send(80), pair.want(80)
        pair.compute(sent, PREFILL_PAGES, 0, 3, is_last=True)
        pair.load(wanted, DECODE_PAGES, 3)
        assert {*pair.until_over(*sent, *wanted)} == {Stage.DONE}
        pair.check(DECODE_PAGES, 3)


@pytest.mark.parametrize(
    "model", [Model(), Model(latent=True), Model(states=(1, 3))], ids=["heads", "latent", "states"]
)
@pytest.mark.parametrize("decode", [{}, {"tp_size": 2}, {"tp_size": 4}, {"pp_size": 2}], ids=str)
def test_ranks_of_context_parallelism_are_copies_that_are_read_in_turns(model, decode):
    """Each has all of a prompt's tokens. A decode engine reads each byte from one of them, and all of them are done."""
    prefill = {"tp_size": 2, "cp_size": 2}
    with closing(Pair(model, prefill=prefill, decode=decode)) as pair:
        sent, wanted = pair.send(1), pair.want(1)
        assert len(sent) == 4
        pair.compute(sent, PREFILL_PAGES, 0, 8)
        pair.compute(sent, PREFILL_PAGES, 8, LONG, is_last=True)
        pair.load(wanted, DECODE_PAGES, LONG)
        assert {*pair.until_over(*sent, *wanted)} == {Stage.DONE}
        pair.check(DECODE_PAGES, LONG)


PROMPT = [5, 6, 7]
HERE, THERE = "sglang 1:", "sglang 2:"
COMPARED = {
    "the same": (PROMPT, {}, PROMPT, {}, ""),
    "the same salt": (PROMPT, {"salt": "a"}, PROMPT, {"salt": "a"}, ""),
    "other tokens": (PROMPT, {}, [5, 6, 8], {}, "tokens"),
    "a longer prompt": ([*PROMPT, 8], {}, PROMPT, {}, "length"),
    "another salt": (PROMPT, {"salt": "a"}, PROMPT, {"salt": "b"}, "cache salt"),
    "no salt": (PROMPT, {"salt": "a"}, PROMPT, {}, "cache salt"),
    "an adapter": (PROMPT, {"adapter": "a"}, PROMPT, {"adapter": "a"}, ""),
    "another adapter": (PROMPT, {"adapter": "a"}, PROMPT, {"adapter": "b"}, "adapter"),
    "no adapter": (PROMPT, {"adapter": "a"}, PROMPT, {}, "adapter"),
    "an adapter without a name": (PROMPT, {"adapter": "a"}, PROMPT, {"adapter": ""}, ""),
    "no adapter, without a name": (PROMPT, {}, PROMPT, {"adapter": ""}, "adapter"),
    "an image": (PROMPT, {"media": f"{HERE}a"}, PROMPT, {"media": f"{HERE}a"}, ""),
    "another image": (PROMPT, {"media": f"{HERE}a"}, PROMPT, {"media": f"{HERE}b"}, "images"),
    "an image that is named otherwise": (
        *(PROMPT, {"media": f"{HERE}a"}),
        *(PROMPT, {"media": f"{THERE}b"}, ""),
    ),
    "images without names": (PROMPT, {"media": "sglang :"}, PROMPT, {"media": f"{HERE}b"}, ""),
    "no image": (PROMPT, {"media": f"{HERE}a"}, PROMPT, {}, "images"),
    "other tokens with images": (
        *(PROMPT, {"media": "sglang :"}),
        *([5, 6, 8], {"media": f"{HERE}b"}, "tokens"),
    ),
    "another kind's image": (
        *(PROMPT, {"media": f"{HERE}a"}),
        *(PROMPT, {"media": "2:a"}, "images"),
    ),
    "other embeddings": (PROMPT, {"embeds": "a"}, PROMPT, {"embeds": "b"}, "embeddings"),
    "no embeddings": (PROMPT, {}, PROMPT, {"embeds": "a"}, "embeddings"),
}


@pytest.mark.parametrize("computed, theirs, own, ours, differs", [*COMPARED.values()], ids=COMPARED)
def test_another_prompt_is_refused(*, computed, theirs, own, ours, differs):
    """A router gives two servers' requests one room."""
    with closing(Pair(Model())) as pair:
        sent, wanted = pair.send(82), pair.want(82)
        identity = Identity(len(computed), digest_of(computed), theirs)
        for each in sent:
            each.prompt_end = msgspec.msgpack.encode(PromptEnd(7, "", len(computed), identity))
        for each in wanted:
            each.identity = lambda: Identity(len(own), digest_of(own), ours)
        pair.compute(sent, PREFILL_PAGES, 0, 3, is_last=True)
        pair.load(wanted, DECODE_PAGES, 3)
        stages = pair.until_over(*sent, *wanted)
        if differs:
            assert {*stages[-len(wanted) :]} == {Stage.FAILED}
            with pytest.raises(OtherPromptError, match=differs):
                wanted[0].failure_exception()
        else:
            assert {*stages} == {Stage.DONE}
            pair.check(DECODE_PAGES, 3)


@pytest.mark.parametrize(
    "computed, here, is_right",
    [
        (("v1",), "v1", True),
        (("v1",), "v2", False),
        (("v2",), "default", False),
        (("v1", "v2"), "v2", False),
        (("",), "v2", True),
        (("v1",), "", True),
    ],
    ids=["equal", "older", "newer", "changed meanwhile", "not stated", "not known here"],
)
def test_what_other_weights_have_computed_is_refused(computed, here, is_right):
    with closing(Pair(Model())) as pair:
        sent, wanted = pair.send(84), pair.want(84)
        for rank in pair.decode.ranks:
            rank.weight_version = lambda: here
        for start, version in zip((0, 8), (computed[0], computed[-1]), strict=True):
            for rank in pair.prefill.ranks:
                rank.weight_version = lambda version=version: version
            for each in sent:
                named = name_of_weights({*each.weights, version})
                each.prompt_end = msgspec.msgpack.encode(PromptEnd(weights=named))
            pair.compute(sent, PREFILL_PAGES, start, start + 8, is_last=start > 0)
        pair.load(wanted, DECODE_PAGES, 16)
        stages = pair.until_over(*sent, *wanted)
        if is_right:
            assert {*stages} == {Stage.DONE}
            pair.check(DECODE_PAGES, 16)
        else:
            assert {*stages[-len(wanted) :]} == {Stage.FAILED}
            with pytest.raises(IncompatiblePeerError, match="same weight_version"):
                wanted[0].failure_exception()


@pytest.mark.parametrize("num_tokens, length", [(36, "longer"), (3, "shorter")])
def test_a_prompt_of_another_length_than_the_requests_is_another_one(num_tokens, length):
    """Whatever its tokens are. Of a longer one the prefill engine has no metadata for where the request ends, and of a
    shorter one no more to read.
    """
    with closing(Pair(Model())) as pair:
        sent, wanted = pair.send(85), pair.want(85)
        pair.compute(sent, PREFILL_PAGES, 0, num_tokens, is_last=True)
        pair.load(wanted, DECODE_PAGES, 5)
        stages = pair.until_over(*sent, *wanted)
        assert {*stages[-len(wanted) :]} == {Stage.FAILED}
        with pytest.raises(OtherPromptError, match=length):
            wanted[0].failure_exception()
