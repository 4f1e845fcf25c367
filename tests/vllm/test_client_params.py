"""Whatever a client writes into its request's `kv_transfer_params`, vLLM's scheduler goes on, with every request."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vllm import scheduler_world as w

pytestmark = pytest.mark.vllm

NUM_TOKENS = 40
OFFER = w.offer(
    NUM_TOKENS,
    remote_tokens_digest="0" * 32,
    remote_first_token=[7, "0" * 16],
    remote_prompt_context={"adapter": "a"},
    remote_prefix_digests=[[30, "0" * 32]],
)
KINDS = [
    OFFER,
    w.FOLLOWED,
    {**w.REMOTE_DECODE, **w.TRANSFER},
    {**OFFER, **w.REMOTE_DECODE},  # a later turn of a chat
]
KEYS = sorted({key for kind in KINDS for key in kind} | {"remote_first_blocks", "tp_size", "x"})

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from(
        [-(1 << 63), -(1 << 31) - 1, 1 << 31, 1 << 63, (1 << 64) - 1]
    ),  # all that vLLM lets in
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["true", "1", "16", "", "\ud800", "a\r\nb", "x" * 513, "there|" + "5" * 32]),
)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


def nested(depth):
    found = []
    for _ in range(depth):
        found = [found]
    return found


values = st.one_of(junk, st.just(nested(300)), st.just([[1]]), st.just([[1, 2]]), st.just(1.0))


@st.composite
def mutated(draw):
    """Parameters of a kind that is valid, of which some keys are missing, and some have other values."""
    params = dict(draw(st.sampled_from(KINDS)))
    for key in draw(st.lists(st.sampled_from(KEYS), max_size=3)):
        params.pop(key, None)
    return params | draw(st.dictionaries(st.sampled_from(KEYS), values, max_size=3))


def as_json(params):
    """Return the parameters as an HTTP server gets them: with lists for tuples, texts for keys, and inexact numbers."""
    return json.loads(json.dumps(params))


params_of_any_client = st.one_of(
    mutated(),
    mutated().map(as_json),
    st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), values, max_size=5),
    junk,
    st.dictionaries(st.integers(-9, 9) | st.binary(max_size=2), values, max_size=2),
)

ENGINES = {
    "a decode engine": {"role": "kv_consumer"},
    "a prefill engine": {"role": "kv_producer"},
    "an engine of both roles": {"role": "kv_both"},
    "a prefill engine of chats": {"role": "kv_producer", "bidirectional_kv_xfer": True},
    "a decode engine of chats": {"role": "kv_consumer", "bidirectional_kv_xfer": True},
    "a child of a MultiConnector": {"beside": "KeepingConnector", "is_ranged": True},
}


class Workers:
    """What the workers report to the engine: each load and each lease ends in the step after its order."""

    def __init__(self, engine):
        self.engine = engine
        self.loading, self.held = set(), set()

    def step(self):
        reports = {"finished_recving": self.loading, "finished_sending": self.held}
        reports = {kind: set(names) for kind, names in reports.items() if names}
        planned = self.engine.scheduler.schedule()
        news = self.engine.news(planned)
        outputs = self.engine.complete(planned, **reports)
        self.loading = {load.request_id for load in news.loads}
        self.held = {hold.request_id for hold in news.holds if hasattr(hold, "lease_duration_s")}
        return outputs


@pytest.mark.parametrize("name", ENGINES)
def test_no_parameters_of_a_client_end_the_engine(world, name):
    """The request is computed, loaded, or waits for its producer until its client gives up."""
    engine = world(**ENGINES[name])
    workers = Workers(engine)

    @given(params=params_of_any_client)
    def check(params):
        other = engine.add(NUM_TOKENS, max_tokens=2)
        request = engine.add_with(NUM_TOKENS, params, max_tokens=2)
        for _ in range(6):
            workers.step()
        assert other.num_output_tokens == 2
        if not request.is_finished():
            assert request.status.name.startswith("WAITING")
            engine.abort(request.request_id)
        while engine.scheduler.requests:
            workers.held |= set(engine.scheduler.requests)
            workers.step()
        assert engine.used_blocks == 0

    check()


REFUSED = [
    ({"do_remote_prefill": 1, "remote_tokens_digest": "0" * 32}, "Expected `bool`"),
    ({**OFFER, "do_remote_prefill": "true", "remote_num_tokens": None}, "Expected `bool`"),
    ({**OFFER, "remote_num_tokens": "16"}, "remote_num_tokens"),
    ({**OFFER, "remote_num_tokens": None}, "remote_num_tokens"),
    ({**OFFER, "remote_block_ids": [["1", "2"]]}, "remote_block_ids"),
    ({**OFFER, "remote_tokens_digest": 5}, "remote_tokens_digest"),
    ({"do_remote_prefill": True}, "missing required field"),
    ("do_remote_prefill", "a mapping"),
    ([["do_remote_prefill", True]], "a mapping"),
]


@pytest.mark.parametrize("params, text", REFUSED)
def test_parameters_that_cannot_be_used_are_refused_in_words(world, caplog, params, text):
    engine = world()
    engine.add_with(NUM_TOKENS, params, max_tokens=1)
    news, outputs = engine.step()
    assert (news.wants, news.loads) == ([], [])
    assert [output.new_token_ids for output in outputs] == [[7]]
    (record,) = [each for each in caplog.records if "cannot be used" in each.message]
    assert record.levelname == "WARNING"
    assert "request r1 is computed without another engine" in record.message
    assert text in record.message


def test_a_request_that_the_server_rejected_frees_the_producer_and_says_so(world, caplog):
    """vLLM's API server then adds a request of one token, which it ends at once."""
    caplog.set_level("INFO", "kvconnector")
    engine = world()
    request = engine.add_with(1, OFFER, max_tokens=1, abort_immediately=True)
    engine.abort(request.request_id)
    news, _ = engine.step()
    assert [want.request_id for want in news.wants] == news.dropped == [request.request_id]
    assert "was rejected here" in caplog.text
    assert "does not offer the first tokens" not in caplog.text
