import time
from unittest.mock import patch

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
)
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds

from kvconnector.errors import LocalError
from kvconnector.integrations.vllm.messages import GroupInfo, WorkerReport
from kvconnector.runtime import TransferParams
from tests.vllm import scheduler_world as w
from tests.vllm.cache_world import DIM, HEADS, SIZE, attention

pytestmark = pytest.mark.vllm


def _load(world, num_tokens=100, prompt=None, **changes):
    """Add a request that waits for its load."""
    request = world.add(num_tokens, w.offer(num_tokens, **changes), prompt=prompt)
    news, _ = world.step()
    return request, news


@pytest.mark.parametrize("cached,first", [(31, 0), (32, 32), (64, 64), (95, 64)])
def test_only_tokens_that_the_prefix_cache_lacks_are_loaded(world, cached, first):
    engine = world()
    engine.add(cached, max_tokens=1, prompt=1)
    engine.step()
    engine.add(100, w.offer(100), prompt=1)
    (load,) = engine.step()[0].loads
    assert load.token_ranges == ((first, 99),)
    if first:  # a full hit loads nothing, and releases the producer
        offer = w.offer(first + 1, remote_request_id="other")
        hit = engine.add(first + 1, offer, prompt=1)
        news, _ = engine.step()
        assert (hit.status.name, news.loads, news.dropped) == ("RUNNING", [], [hit.request_id])


def test_a_window_is_loaded_into_the_blocks_after_those_that_are_gone(world):
    engine = world(specs=[attention(), attention(SlidingWindowSpec, sliding_window=SIZE)])
    request, news = _load(engine, remote_block_ids=[[1, 2, 3, 4]] * 2)
    full, window = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    (load,) = news.loads
    assert [(each.first_block, each.block_ids.tolist()) for each in load.local_blocks] == [
        (0, full),
        (window.count(0), [block for block in window if block]),
    ]
    assert window.count(0) > 0


WINDOWED = [attention(), attention(SlidingWindowSpec, sliding_window=SIZE + 8)]
STATE = {"remote_first_blocks": [0, 0, 158]}
"""The place of a producer's state after 159 tokens."""
HALVES = {"remote_block_ids": [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4]]}
"""Blocks of a producer with half our block size. Those of the window begin with its fourth."""


@pytest.mark.parametrize(
    "offer, first, is_found",
    [({"remote_block_ids": [[1, 2, 3, 4], [1, 2, 3]]}, 32, True), (HALVES, 60, False)],
)
def test_requests_find_only_window_blocks_that_a_load_has_filled(world, offer, first, is_found):
    """After 99 tokens a window begins at token 60, and after the 96 that another request finds at token 57."""
    engine = world(specs=WINDOWED)
    places = {"remote_first_blocks": [0, 1 if is_found else 3]}
    _, other = (engine.add(100, w.offer(100, **offer, **places), prompt=1) for _ in range(2))
    (load,) = engine.step()[0].loads
    assert load.token_ranges == ((0, 99), (first, 99))
    engine.step(finished_recving={"r1"})
    _, outputs = engine.step()
    (found,) = [each.prefill_stats for each in outputs if each.request_id == other.request_id]
    assert found.num_local_cached_tokens == (96 if is_found else 0)


DRAFTED = [
    attention(),
    attention(SlidingWindowSpec, sliding_window=SIZE, extra_retained_tokens=3),
]
"""The groups of a model with windows and several draft modules."""


def test_requests_find_no_window_block_that_vllm_keeps_but_no_load_fills(world):
    """With several draft modules it keeps more tokens than the next one sees: after 159 tokens those from token 125 on,
    of which a load brings those from token 128 on. A request that finds 128 tokens sees those from token 97 on.
    """
    engine = world(specs=DRAFTED)
    _, news = _load(engine, 160, prompt=1, remote_block_ids=[list(range(1, 6))] * 2)
    assert news.loads[0].token_ranges == ((0, 159), (128, 159))
    engine.step(finished_recving={"r1"})
    other = engine.add(150, prompt=1)
    _, outputs = engine.step()
    (found,) = [each.prefill_stats for each in outputs if each.request_id == other.request_id]
    assert found.num_local_cached_tokens == 0


def test_vllm_zeroes_blocks_that_no_load_fills(world):
    """Where a reused block may hold NaN, as beside recurrent states: kernels also multiply what they mask."""
    if not hasattr(KVConnectorBase_V1, "get_loaded_kv_cache_group_ids"):
        pytest.skip("vLLM 0.31 does not ask which blocks a load fills")
    engine = world(specs=[*DRAFTED, w.state_spec()], engine={"enable_prefix_caching": False})
    engine.add(160, w.offer(160, remote_block_ids=[list(range(1, 6))] * 2 + [[9]], **STATE))
    planned = engine.scheduler.schedule()
    (load,) = engine.news(planned).loads
    _, window, _ = engine.scheduler.kv_cache_manager.get_block_ids("r1")
    assert load.token_ranges[1] == (128, 159)
    assert window[:3] == [0] * 3
    assert window[3] in planned.new_block_ids_to_zero


def test_a_loaded_request_that_ends_before_it_runs_leaves_no_partly_filled_block(world):
    engine = world(specs=WINDOWED)
    places = {**HALVES, "remote_first_blocks": [0, 3]}
    _load(engine, prompt=1, **places)
    engine.step(finished_recving={"r1"})
    cache = engine.scheduler.kv_cache_manager
    with patch.object(cache, "allocate_slots", lambda *_, **__: None):
        engine.step()
    engine.abort("r1")
    _, news = _load(engine, prompt=1, remote_request_id="another", **places)
    assert news.loads[0].token_ranges == ((0, 99), (60, 99))


@pytest.mark.parametrize("num_tokens, is_offered", [(3, False), (4, True)])
def test_a_partly_filled_block_is_not_offered(world, num_tokens, is_offered):
    """Another engine would take it for a whole one. At token 103 the window begins at the next block."""
    engine = world(role="kv_both", specs=WINDOWED, bidirectional_kv_xfer=True)
    offer = w.offer(100, **HALVES, remote_first_blocks=[0, 3])
    request = engine.add(100, offer, max_tokens=num_tokens)
    engine.step()
    engine.step(finished_recving={"r1"})
    outputs = []
    while not request.is_finished():
        outputs = engine.step()[1]
    assert (outputs[-1].kv_transfer_params is not None) == is_offered


def _end_preempted(engine, request):
    """Preempt a request while the step that samples its last token is under way. Returns the step's output."""
    planned = engine.scheduler.schedule()
    assert request.request_id in planned.num_scheduled_tokens
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    with patch.object(engine, "_has_prompt", return_value=True):
        (output,) = engine.complete(planned)
    assert request.is_finished()
    return output


ASYNC = {"is_async": True, "engine": {"async_scheduling": True}}


@pytest.mark.parametrize("params", [w.REMOTE_DECODE, w.REMOTE_DECODE | w.TRANSFER])
def test_a_prompt_that_is_preempted_before_its_token_comes_is_not_offered(world, params):
    """vLLM delivers the token, but other requests have the blocks."""
    engine = world(role="kv_producer", **ASYNC)
    request = engine.add(100, dict(params), max_tokens=1)
    assert _end_preempted(engine, request).kv_transfer_params is None
    news, _ = engine.step()
    # a decode engine that follows the prompt may be reading them
    assert (news.withdrawn, news.holds) == (["r1"] if "transfer_id" in params else [], [])
    assert (engine.scheduler.requests, engine.used_blocks) == ({}, 0)


def test_a_loaded_request_that_is_preempted_before_its_last_token_ends_alone(world):
    """Its block that a load has filled in part is gone, like all others."""
    engine = world(role="kv_both", specs=WINDOWED, bidirectional_kv_xfer=True, **ASYNC)
    offer = w.offer(100, **HALVES, remote_first_blocks=[0, 3])
    request = engine.add(100, offer, max_tokens=1)
    engine.step()
    engine.step(finished_recving={"r1"})
    assert _end_preempted(engine, request).kv_transfer_params is None
    assert (engine.scheduler.requests, engine.used_blocks) == ({}, 0)


WIDE = attention(num_kv_heads=HEADS * 2, head_size=DIM // 2)


@pytest.mark.parametrize("others, first", [([], 96), ([WIDE], 0)])
def test_groups_that_find_different_prefixes_get_all_that_they_lack(world, others, first):
    """Of a cached prompt there is no state, and a second group with all tokens has lost the last ones."""
    state = w.state_spec(block_size=SIZE, mamba_cache_mode="align")
    engine = world(specs=[attention(), *others, state])
    engine.add(100, prompt=1, max_tokens=1)
    planned = engine.scheduler.schedule()
    cache = engine.scheduler.kv_cache_manager
    second = cache.get_block_ids("r1")[1]
    engine.complete(planned)
    cache.evict_blocks(set(second[1:3]))
    blocks = [[1, 2, 3, 4, 5]] * (1 + len(others))
    places = {"remote_first_blocks": [0] * len(blocks) + [138]}
    engine.add(140, w.offer(140, remote_block_ids=[*blocks, [6]], **places), prompt=1)
    (load,) = engine.step()[0].loads
    assert load.token_ranges == (*[(first, 139)] * len(blocks), (138, 139))


def test_another_connectors_reports_reach_vllm(world):
    engine = world(role="kv_producer", beside="KeepingConnector")
    engine.add(40, max_tokens=1)
    engine.add(100, dict(w.REMOTE_DECODE), max_tokens=1)
    engine.step()
    assert engine.used_blocks == 6
    # the first is kept only by the other connector, the second by both, and reported once both are done
    engine.step(finished_sending={"r1"})
    assert engine.used_blocks == 4
    engine.step(finished_sending={"r2"})
    assert engine.used_blocks == 0
    assert engine.scheduler.requests == {}


@pytest.mark.parametrize("is_followed", [False, True])
def test_one_of_several_completions_reads_and_the_others_find_its_blocks(world, is_followed):
    engine = world()
    name = {"transfer_id": "t", "remote_block_ids": None, "remote_request_id": None}
    offer = w.offer(100, **(name if is_followed else {}))
    requests = [engine.add(100, offer, prompt=1) for _ in range(3)]
    news, _ = engine.step()
    assert [want.request_id for want in news.wants] == ["r1"]
    if is_followed:
        assert (news.loads, engine.used_blocks) == ([], 0)
        engine.step(kv_connector_worker_meta=WorkerReport({"r1"}))
        news, _ = engine.step()
    assert [load.request_id for load in news.loads] == ["r1"]
    assert [request.status.name for request in requests[1:]] == ["WAITING", "WAITING"]
    engine.step(finished_recving={"r1"})
    news, outputs = engine.step()
    assert {output.request_id for output in outputs} == {"r1", "r2", "r3"}
    hits = {output.request_id: output.prefill_stats.num_local_cached_tokens for output in outputs}
    assert (hits["r2"], hits["r3"]) == (96, 96)
    assert (news.wants, news.loads, news.dropped) == ([], [], [])


@pytest.mark.parametrize("end", ["aborted", "failed"])
def test_other_completions_do_not_wait_for_one_that_ended(world, end):
    engine = world(policy="fail")
    _, other = (engine.add(100, w.offer(100), prompt=1) for _ in range(2))
    engine.step()
    if end == "aborted":
        engine.abort("r1")
        engine.step()
    engine.step(finished_recving={"r1"}, failed_recving={"r1"})
    engine.step()
    assert other.num_output_tokens > 0
    assert engine.scheduler.connector._scheduler._siblings.first_of("r1") is None


@pytest.mark.parametrize(
    "key, value",
    [("remote_block_ids", []), ("remote_num_tokens", -1), ("remote_engine_id", "")],
)
def test_unusable_parameters_are_computed_here(world, key, value):
    engine = world()
    engine.add(100, w.offer(100, **{key: value}))
    news, outputs = engine.step()
    assert news.wants == []
    assert news.loads == []
    assert [output.new_token_ids for output in outputs] == [[7]]


@pytest.mark.parametrize("is_followed", [True, False])
@pytest.mark.parametrize(
    "sampling", [{"prompt_logprobs": 1}, {"skip_reading_prefix_cache": True}], ids=str
)
def test_a_request_that_needs_every_token_computed_waits_for_nobody(world, sampling, is_followed):
    """The producer's blocks are freed before the request has its turn, and it does not wait for the prompt's begin."""
    engine = world(engine={"max_num_seqs": 1})
    engine.add(40, max_tokens=3)
    params = dict(w.FOLLOWED) if is_followed else w.offer(100)
    request = engine.add(100, params, **sampling)
    news, _ = engine.step()
    assert ([want.request_id for want in news.wants], news.dropped) == (["r2"], ["r2"])
    for _ in range(3):
        news, _ = engine.step()
        assert (news.loads, news.dropped) == ([], [])
    assert (request.status.name, request.num_computed_tokens) == ("RUNNING", 100)


def test_a_preempted_request_is_not_loaded_again(world):
    engine = world()
    request, news = _load(engine)
    (want,), (load,) = news.wants, news.loads
    assert (want.request_id, want.transfer_id, want.engine.address) == (
        "r1",
        "there",
        "tcp://127.0.0.1:9",
    )
    assert load.token_ranges == ((0, 99),)
    for _ in range(2):  # a report may repeat
        engine.step(finished_recving={"r1"})
    assert (request.status.name, request.num_output_tokens) == ("RUNNING", 1)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    news, _ = engine.step()
    assert news.loads == []
    assert request.num_computed_tokens >= 100


def test_a_producer_offers_a_finished_prompt_and_keeps_its_blocks(world):
    engine = world(role="kv_producer")
    engine.add(100, dict(w.REMOTE_DECODE), max_tokens=1)
    _, (output,) = engine.step()
    params = output.kv_transfer_params
    assert TransferParams.from_mapping(params).remote_num_tokens == 100
    news, _ = engine.step()
    (hold,) = news.holds
    assert hold.blocks[0].block_ids.tolist() == params["remote_block_ids"][0]
    assert engine.used_blocks == 4
    for _ in range(2):  # a report may repeat
        engine.step(finished_sending={"r1"})
    assert engine.used_blocks == 0


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_prompts_last_token_is_left_to_the_decode_engine_in_all_its_forms(world, is_mixed):
    """Several requests of one process may share their prompt object."""
    window = attention(SlidingWindowSpec, sliding_window=32)
    engine = world(role="kv_producer", specs=[attention(), window])
    forms = {"prompt_token_ids": list(range(100))}
    if is_mixed:
        forms["prompt_embeds"] = torch.zeros(100, 8)
        forms["prompt_is_token_ids"] = [token not in range(3, 9) for token in range(100)]
    for _ in range(2):
        request = engine.add(100, dict(w.REMOTE_DECODE), forms=forms)
        assert request.num_prompt_tokens == request.num_tokens == 99
        (new,) = engine.scheduler.schedule().scheduled_new_reqs
        for name, prompt in forms.items():
            assert len(getattr(new, name)) == len(prompt) - 1 == 99


def test_a_prompt_that_comes_in_parts_is_computed_whole(world):
    """vLLM appends the next part to what it has of the prompt, so no token of it may be left out."""
    window = attention(SlidingWindowSpec, sliding_window=32)
    engine = world(role="kv_producer", specs=[attention(), window])
    request = engine.add_with(100, dict(w.REMOTE_DECODE), resumable=True)
    assert request.num_prompt_tokens == len(request.prompt_token_ids) == 100
    assert request.max_tokens == 4


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_prompt_that_comes_in_parts_is_offered_once_at_its_end(world, is_idle):
    """vLLM aborts it if it waits for a part when it ends. Until then it keeps its blocks itself."""
    engine = world(role="kv_producer")
    request = engine.add_with(100, dict(w.REMOTE_DECODE), max_tokens=1, resumable=True)
    (output,) = engine.step()[1]
    assert (output.kv_transfer_params, request.status.name) == (None, "WAITING_FOR_STREAMING_REQ")
    part = engine.part_of(request, [3] * 30, resumable=True)
    end = engine.part_of(request, [3], resumable=False)
    engine.scheduler.add_request(part)
    (output,) = engine.step()[1] if is_idle else [None]
    engine.scheduler.add_request(end)
    while request.request_id in engine.scheduler.requests and not request.is_finished():
        (output,) = engine.step()[1]
    (hold,) = engine.step()[0].holds or [None]
    if is_idle:
        assert (output.kv_transfer_params, hold, engine.used_blocks) == (None, None, 0)
    else:
        assert output.kv_transfer_params["remote_num_tokens"] == hold.num_tokens == 130


def test_nothing_is_offered_of_requests_that_were_aborted_or_stay_here(world):
    engine = world(role="kv_producer")
    engine.add(100, dict(w.REMOTE_DECODE), max_tokens=4)
    engine.add(40, max_tokens=1)
    _, outputs = engine.step()
    engine.abort("r1")
    assert engine.step()[0].holds == []
    assert engine.used_blocks == 0
    consumer = world()  # which is not asked for a transfer
    consumer.add(40, dict(w.REMOTE_DECODE), max_tokens=1)
    outputs += consumer.step()[1]
    assert [output.kv_transfer_params for output in outputs] == [None] * 3


def test_a_decode_engine_keeps_a_conversation_for_the_next_turn(world):
    began_s = time.perf_counter()
    decode = world(bidirectional_kv_xfer=True, decoder_kv_blocks_ttl=99)
    request, _ = _load(decode)
    decode.step(finished_recving={"r1"})
    outputs = []
    while not (outputs and outputs[-1].finished):
        outputs = decode.step()[1]
    params = outputs[-1].kv_transfer_params
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    # in seconds of the engine's monotonic clock, as NixlConnector states it
    assert began_s + 99 <= params["remote_blocks_expiry_time"] <= time.perf_counter() + 99
    # the last sampled token is not in the cache
    assert params["remote_num_tokens"] == request.num_tokens - 1 == 103
    (hold,) = decode.step()[0].holds
    assert hold.lease_duration_s == 99
    prefill = world(role="kv_producer", bidirectional_kv_xfer=True)
    history = list(request.all_token_ids)
    prefill.add(0, {**params, **w.REMOTE_DECODE}, forms={"prompt_token_ids": history + [8] * 96})
    (load,) = prefill.step()[0].loads
    assert load.token_ranges == ((0, 103),)


def test_a_step_that_is_planned_ahead_changes_no_offer(world):
    engine = world(role="kv_both", is_async=True, bidirectional_kv_xfer=True)
    engine.add(100, dict(w.REMOTE_DECODE), max_tokens=1)
    chat = engine.add(50, {"do_remote_prefill": False}, max_tokens=3)
    finished, news = {}, []
    ahead = engine.scheduler.schedule()
    for _ in range(5):
        # the next step is planned before this one's tokens are known
        planned, ahead = ahead, engine.scheduler.schedule()
        outputs = engine.complete(planned)
        news.append(engine.news(ahead))
        finished |= {output.request_id: output for output in outputs if output.finished}
    prompt, turn = finished["r1"].kv_transfer_params, finished["r2"].kv_transfer_params
    assert prompt["remote_num_tokens"] == 100
    assert chat.num_output_tokens == 3
    # the last sampled token is not in the cache
    assert turn["remote_num_tokens"] == 52
    holds = {hold.request_id: hold for step in news for hold in step.holds}
    assert {name: hold.num_tokens for name, hold in holds.items()} == {"r1": 100, "r2": 52}


def test_an_engine_that_offers_blocks_requires_their_delivery(world):
    ways = [
        ("kv_producer", False),
        ("kv_both", False),
        ("kv_consumer", True),
        ("kv_consumer", False),
    ]
    engines = [world(role=role, bidirectional_kv_xfer=both) for role, both in ways]
    assert [e.scheduler.requires_kv_delivery for e in engines] == [True, True, True, False]


def test_handshakes_that_are_not_this_engines_are_refused_and_a_repeated_one_changes_nothing(world):
    """vLLM 0.33 passes it again when the engine wakes up; keys may name context parallel ranks."""
    engine = world()
    request, _ = _load(engine)
    engine.connector.set_xfer_handshake_metadata_pp_aware({(0, 0, 0): engine.handshakes[0, 0]})
    engine.step(finished_recving={"r1"})
    engine.step()
    assert request.status.name == "RUNNING"
    one, two = (
        w.handshake((GroupInfo(vllm_group=0, kernel_blocks=ratio),), tp_rank=ratio - 1)
        for ratio in (1, 2)
    )
    for handshakes, text in (
        ({(0, 0): one}, "already registered"),
        ({(0, 0): one, (0, 1): two}, "different cache groups"),
        ({(0, 0): KVConnectorHandshakeMetadata()}, "only one child of a MultiConnector"),
    ):
        with pytest.raises(LocalError, match=text):
            engine.connector.set_xfer_handshake_metadata_pp_aware(handshakes)


@pytest.mark.parametrize("is_async", [False, True])
def test_workers_wait_for_loads_only_where_nothing_is_computed(world, is_async):
    """Neither in the step nor in the one before it, if that may still run."""
    engine = world(is_async=is_async)
    idle = []
    engine.add(100, w.offer(100))
    for number in range(6):
        if number == 1:
            engine.add(50, max_tokens=2)
        planned = engine.scheduler.schedule()
        idle.append(planned.kv_connector_metadata.is_idle)
        engine.complete(planned)
    assert idle == [True, False, False, not is_async, True, True]


def test_a_state_that_a_step_in_flight_has_moved_on_is_not_offered(world):
    """When the request ends with its stop token, the next step has been planned already, which moves the state on."""
    specs = [attention(), w.state_spec()]
    for is_async in (False, True):
        engine = world(
            role="kv_both",
            specs=specs,
            is_async=is_async,
            engine={"enable_prefix_caching": False},
            bidirectional_kv_xfer=True,
        )
        engine.add(50, {"do_remote_prefill": False}, max_tokens=8, stop_token_ids=[7])
        planned = engine.scheduler.schedule()
        if is_async:
            assert engine.scheduler.schedule().num_scheduled_tokens == {"r1": 1}
        (output,) = engine.complete(planned)
        assert str(output.finish_reason) == "stop"
        assert (output.kv_transfer_params is None) == is_async


@pytest.mark.parametrize("num_tokens, is_offered", [(1, True), (4, False)])
@pytest.mark.parametrize("scratch_blocks", [2, 0])
def test_a_state_that_may_be_among_those_of_draft_tokens_is_not_offered(
    world, scratch_blocks, num_tokens, is_offered
):
    """After a step with draft tokens it is in one of the scratch blocks, by the number of accepted tokens; or without
    any (Kimi's with `--use-replayssm`) maybe not in the request's last block, which rejected tokens may have opened.
    """
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    engine = world(
        role="kv_both",
        specs=[attention(), w.state_spec(num_speculative_blocks=scratch_blocks)],
        engine={"enable_prefix_caching": False, "speculative_config": drafts},
        bidirectional_kv_xfer=True,
    )
    chat = engine.add(50, {"do_remote_prefill": False}, max_tokens=num_tokens)
    outputs = []
    while not chat.is_finished():
        outputs += engine.step()[1]
        engine.scheduler.update_draft_token_ids(DraftTokenIds(["r1"], [[8, 9]]))
    assert [each.new_token_ids for each in outputs] == [[7], [8, 9, 7]][: len(outputs)]
    assert (chat.num_output_tokens, chat.num_computed_tokens) == (num_tokens, 49 + num_tokens)
    assert (outputs[-1].kv_transfer_params is not None) == is_offered
