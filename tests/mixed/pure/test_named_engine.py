"""SGLang's decode engines read prompts of engines of another kind, which a router names; neither is there."""

import time
from contextlib import ExitStack, closing

import pytest

from kvconnector.errors import IncompatiblePeerError, OtherPromptError, RemoteError
from kvconnector.integrations.sglang.transfers import Stage
from tests.mixed.pure.engines import VOCABULARY, NamedPools, PrefillEngine, want
from tests.sglang.pure.engines import DEADLINE_S, Engine, error_of
from tests.sglang.pure.pools import ROW_WIDTHS, Model
from tests.support.ports import free_ports

pytestmark = pytest.mark.ucx

PROMPT = [*range(100, 137)]
PREFILL_BLOCKS, DECODE_PAGES = [5, 2, 9, 3, 11, 7], [8, 3, 12, 6, 1, 10, 2, 15, 9, 13]
ROW = 2


class Pair:
    """An engine that is not SGLang's, and SGLang's decode ranks."""

    def __init__(self, model, prefill, decode):
        self._stack = ExitStack()
        try:
            self.prefill = self._stack.enter_context(closing(PrefillEngine(model, **prefill)))
            options = {"is_prefill": False, "port": free_ports(), "pools": NamedPools, **decode}
            self.decode = self._stack.enter_context(closing(Engine(model, **options)))
        except BaseException:
            self._stack.close()
            raise

    def close(self):
        self._stack.close()

    def until_over(self, wanted):
        """Step both engines until every rank's request is over. Returns the stages."""
        until_s = time.monotonic() + DEADLINE_S
        while True:
            self.prefill.step()
            stages = {each.poll() for each in wanted}
            if stages <= {Stage.DONE, Stage.FAILED}:
                return stages
            assert time.monotonic() < until_s, stages
            time.sleep(0.001)

    def load(self, wanted, num_tokens):
        """Load into `DECODE_PAGES` once each rank may allocate them."""
        until_s = time.monotonic() + DEADLINE_S
        while any(each.poll() == Stage.BOOTSTRAPPING for each in wanted):
            assert time.monotonic() < until_s
            self.prefill.step()
        for transfer, pools in zip(wanted, self.decode.pools, strict=True):
            for tensor in pools.aux:
                tensor.fill_(9)  # an earlier request's
            transfer.num_tokens = num_tokens
            transfer.send_metadata(DECODE_PAGES[: -(-num_tokens // pools.page_size)], ROW, [])

    def until_freed(self, room):
        until_s = time.monotonic() + DEADLINE_S
        while f"r{room}" not in self.prefill.sent:
            assert time.monotonic() < until_s
            self.prefill.step()

    def check(self, num_tokens, room, token):
        """Check all tokens on all ranks, and that the row of metadata has the token, the room and nothing else."""
        for pools in self.decode.pools:
            rows = pools.rows_of(DECODE_PAGES, 0, range(num_tokens))
            for part, layers in enumerate(pools.kv):
                for layer, tensor in layers.items():
                    assert tensor[rows].equal(pools.expected_pages(part, layer, range(num_tokens)))
            tokens, *between, rooms = (tensor[ROW].numpy().tobytes() for tensor in pools.aux)
            if not pools.has_draft:  # then nobody looks at what a draft model needs
                between = between[: len(ROW_WIDTHS) - 1]
            for found, number in ((tokens, token), (rooms, room)):
                assert found == number.to_bytes(len(found), "little")
            assert not any(map(any, between))


def _asked(pair, room, *, prompt=PROMPT, token=7):
    """Ask both engines at once, for the same prompt. Returns the decode ranks' requests."""
    pair.prefill.begin(room)
    wanted = want(pair.decode, pair.prefill, room, prompt)
    pair.prefill.compute(room, PREFILL_BLOCKS, 16)
    pair.load(wanted, len(PROMPT))
    pair.prefill.compute(room, PREFILL_BLOCKS, len(PROMPT))
    pair.prefill.end(room, PREFILL_BLOCKS, PROMPT, token)
    return wanted


CASES = {
    "as it is": (Model(), {}, {}),
    "smaller pages": (Model(), {"block": 16}, {}),
    "larger pages": (Model(), {}, {"page_size": 16}),
    "fewer ranks": (Model(), {"tp_size": 2}, {}),
    "more ranks": (Model(), {}, {"tp_size": 2, "page_size": 16}),
    "a head on two ranks": (Model(heads=1), {"tp_size": 2}, {"tp_size": 2}),
    "stages": (Model(), {"tp_size": 2}, {"pp_size": 2}),
    "a latent": (Model(latent=True), {"tp_size": 2}, {"page_size": 8}),
    "a draft model here": (Model(draft=1), {}, {}),
}


@pytest.mark.parametrize("model, prefill, decode", [*CASES.values()], ids=[*CASES])
def test_a_prompt_and_its_first_token_arrive(model, prefill, decode):
    with closing(Pair(model, prefill, decode)) as pair:
        wanted = _asked(pair, 90)
        assert pair.until_over(wanted) == {Stage.DONE}
        pair.check(len(PROMPT), 90, 7)
        pair.until_freed(90)


def test_a_prompt_that_was_computed_before_arrives_too():
    with closing(Pair(Model(), {}, {})) as pair:
        pair.prefill.begin(91)
        pair.prefill.compute(91, PREFILL_BLOCKS, len(PROMPT))
        pair.prefill.end(91, PREFILL_BLOCKS, PROMPT, 1 << 17)
        wanted = want(pair.decode, pair.prefill, 91, PROMPT)
        pair.load(wanted, len(PROMPT))
        assert pair.until_over(wanted) == {Stage.DONE}
        pair.check(len(PROMPT), 91, 1 << 17)


def test_another_prompt_than_the_requests_fails_in_all_ranks():
    with closing(Pair(Model(), {}, {"tp_size": 2})) as pair:
        wanted = _asked(pair, 92, prompt=[*PROMPT[:-1], 4])
        assert pair.until_over(wanted) == {Stage.FAILED}
        for each in wanted:
            assert isinstance(error_of(each), OtherPromptError)
        pair.until_freed(92)


@pytest.mark.parametrize("token", [None, -1, VOCABULARY, 1 << 31, (1 << 64) - 1])
def test_without_a_first_token_the_request_fails_and_says_why(token):
    """Nor with one that the model does not have: looking it up would end the engine."""
    with closing(Pair(Model(), {}, {})) as pair:
        wanted = _asked(pair, 93, token=token)
        assert pair.until_over(wanted) == {Stage.FAILED}
        error = error_of(wanted[0])
        assert isinstance(error, RemoteError)
        assert "first token" in str(error)
        assert "log probabilities" in str(error)
        assert wanted[0].kv_mgr.is_abort_release_safe(93)
        # the next request is served
        assert pair.until_over(_asked(pair, 94)) == {Stage.DONE}


@pytest.mark.parametrize(
    "prefill, named", [({"dtype": "bfloat16"}, "dtype"), ({"other": 1}, "kv_heads")], ids=str
)
def test_another_models_cache_is_refused_by_the_name_of_what_differs(prefill, named):
    other = Model(heads=2) if "other" in prefill else Model()
    prefill.pop("other", None)
    with ExitStack() as stack:
        pair = stack.enter_context(closing(Pair(Model(), {}, {})))
        pair.prefill = stack.enter_context(closing(PrefillEngine(other, **prefill)))
        pair.prefill.begin(95)
        wanted = want(pair.decode, pair.prefill, 95, PROMPT)
        pair.prefill.compute(95, PREFILL_BLOCKS, len(PROMPT))
        pair.load(wanted, len(PROMPT))
        assert pair.until_over(wanted) == {Stage.FAILED}
        error = error_of(wanted[0])
        assert isinstance(error, IncompatiblePeerError)
        assert named in str(error)
