"""Pipeline stages of a decode engine, some of which fail a request: our receivers in SGLang's own queues and consensus.

Its scheduler's methods run with stand-ins for what computes, and for the channel from stage to stage.
"""

import copy
from collections import deque
from contextlib import closing
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import distributed

from kvconnector.errors import BlockIdError
from kvconnector.integrations.sglang.transfers import Stage
from tests.sglang.pure.engines import Pair, fail_alone, loaded
from tests.sglang.pure.pools import Model
from tests.support.waiting import until

pytestmark = [pytest.mark.sglang, pytest.mark.ucx]

PAGES, OTHERS, TOKENS = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 18
FAILING = [(0,), (1,), (0, 1)]
MOMENTS = ("before it is computed", "in the middle", "once it is computed")


@pytest.fixture(scope="module")
def group():
    """The ranks of one stage: this one."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.fixture
def ring(monkeypatch, group):
    """Makes the schedulers of two stages, with the receivers of one request, or of several, each a list."""
    from sglang.srt.disaggregation import decode

    from kvconnector.integrations.sglang import backend

    backend.hook_queues()
    backend.hook_stages()
    monkeypatch.setattr(
        decode, "release_kv_cache", lambda req, *_, **__: req.events.append("freed")
    )

    def make(*requests, waiting=False):
        channels = [deque() for _ in range(2)]
        return [
            _scheduler(at, channels, [each[at] for each in requests], waiting=waiting)
            for at in range(2)
        ]

    return make


@pytest.fixture
def pair(ring):  # SGLang is imported before workers run
    with closing(Pair(Model(), decode={"pp_size": 2})) as made:
        for rank in made.decode.ranks:
            rank.enable_deferred_decode_kv_release = True  # as `KVManager` of a decode engine
        yield made


def _stage_of(at, channels):
    """Return SGLang's scheduler of the stage at one place of a ring, without what computes."""
    from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin

    class Scheduler(SchedulerPPMixin):
        attn_cp_cpu_group = attn_tp_cpu_group = scheduler_stage_metrics = None
        enable_hisparse = enable_decode_hicache = False
        pp_group = SimpleNamespace(is_first_rank=at == 0, is_last_rank=at == 1)
        metrics_reporter = SimpleNamespace(enable_metrics=False)

        def __init__(self):
            self.waiting_queue, self.told = [], []
            self.output_streamer = SimpleNamespace(
                stream_output=lambda reqs, *_: self.told.extend(req.rid for req in reqs)
            )

        def _pp_recv_pyobj_from_prev_stage(self):
            return channels[at].popleft()

        def _pp_send_pyobj_to_next_stage(self, data, async_send=False):
            channels[1 - at].append(copy.deepcopy(data))
            return []

    return Scheduler


def _scheduler(at, channels, receivers, *, waiting):
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue

    scheduler = _stage_of(at, channels)()
    entries = [_entry(number, each) for number, each in enumerate(receivers)]
    common = {
        "scheduler": scheduler,
        "tp_rank": 0,
        "gloo_group": None,
        "tree_cache": Mock(),
        "enable_staging": False,
    }
    preallocs = object.__new__(DecodePreallocQueue)
    vars(preallocs).update(common, queue=entries if waiting else [], pp_size=2)
    transfers = object.__new__(DecodeTransferQueue)
    vars(transfers).update(
        common,
        queue=[] if waiting else entries,
        enable_host_receive=False,
        enable_deferred_kv_release=True,
        deferred_kv_release_timeout=0.0,
        _deferred_releases=[],
        metadata_buffers=SimpleNamespace(
            bootstrap_room=torch.ones(len(entries), 1), clear_slot=lambda idx: None
        ),
        req_to_metadata_buffer_idx_allocator=SimpleNamespace(free=lambda idx: None),
        _commit_transfer_to_req=lambda each: each.req.events.append("computed"),
    )
    scheduler.disagg_decode_prealloc_queue = preallocs
    scheduler.disagg_decode_transfer_queue = transfers
    scheduler.requests = [each.req for each in entries]
    return scheduler


def _entry(number, receiver):
    from sglang.srt.disaggregation.decode import DecodeRequest

    req = SimpleNamespace(
        rid=f"request-{number}",
        bootstrap_room=receiver.room,
        bootstrap_host="127.0.0.1",
        finished_reason=None,
        return_logprob=False,
        events=[],
        time_stats=Mock(),
    )
    return DecodeRequest(req=req, kv_receiver=receiver, metadata_buffer_index=number)


def _pass(ring):
    """Let what has ended go through the stages and round, as SGLang's loop does."""
    first, last = ring
    listed = first._pp_pd_get_decode_transferred_ids()
    first._pp_send_pyobj_to_next_stage(listed)
    listed = last._pp_pd_get_decode_transferred_ids()
    last._pp_pd_send_consensus_release_ids([[]], 0, None, listed)
    released = first.process_decode_transfer_queue(first._pp_recv_pyobj_from_prev_stage())
    first._pp_pd_send_consensus_release_ids([[]], 0, released, None)
    last.process_decode_transfer_queue(last._pp_recv_pyobj_from_prev_stage())


def _left(ring):
    queues = [each.disagg_decode_transfer_queue for each in ring]
    return [len(each.queue) + len(each._deferred_releases) for each in queues]


@pytest.mark.parametrize("failing", FAILING, ids=str)
def test_what_one_stage_fails_is_failed_in_all(ring, pair, failing):
    """Of stages that have read their parts, which SGLang would let go on with a request that another lacks."""
    one, other = loaded(pair, 40, PAGES, OTHERS, TOKENS), loaded(pair, 41, PAGES, OTHERS, TOKENS)
    for at in failing:
        fail_alone(one[at])
    stages = ring(one, other)
    until(lambda: _left(stages) == [0, 0], lambda: _pass(stages))
    events = [[req.events for req in stage.requests] for stage in stages]
    assert events == [[["freed"], ["computed"]]] * 2
    assert [each.told for each in stages] == [["request-0"]] * 2
    assert [[req.rid for req in each.waiting_queue] for each in stages] == [["request-1"]] * 2


def test_a_stage_that_still_reads_is_waited_for(ring, pair):
    sent, wanted = pair.send(42), pair.want(42)
    pair.compute(sent, PAGES, 0, 16)
    pair.load(wanted, OTHERS, TOKENS)
    fail_alone(wanted[1])
    stages = ring(wanted)
    _pass(stages)
    assert _left(stages) == [1, 1]
    pair.compute(sent, PAGES, 16, TOKENS, is_last=True)
    pair.until_over(wanted[0])
    until(lambda: _left(stages) == [0, 0], lambda: _pass(stages))
    assert [each.requests[0].events for each in stages] == [["freed"]] * 2
    for each in sent:
        each.abort()


@pytest.mark.parametrize("failing", FAILING, ids=str)
def test_what_a_stage_fails_before_it_has_pages_is_failed_in_all(ring, pair, failing):
    wanted = pair.want(43)
    for at in failing:
        wanted[at].abort()
    stages = ring(wanted, waiting=True)
    first, last = stages
    first._pp_send_pyobj_to_next_stage(first._pp_pd_get_prealloc_ids())
    agreed = last._pp_pd_get_prealloc_ids()
    assert agreed == [[], ["request-0"]]
    for each in stages:
        each.disagg_decode_prealloc_queue._update_handshake_waiters(None, *agreed)
    assert [each.poll() for each in wanted] == [Stage.FAILED] * 2
    assert all(each.requests[0].finished_reason is not None for each in stages)


@pytest.mark.parametrize("failing", FAILING, ids=str)
def test_what_a_stage_fails_just_before_it_gets_pages_is_failed_in_all(ring, pair, failing):
    """The stages have agreed that it may have pages, so SGLang allocates them."""
    sent, wanted = pair.send(44), pair.want(44)
    pair.compute(sent, PAGES, 0, 16)
    pair.until_started(*wanted)
    stages = ring(wanted, waiting=True)
    first, last = stages
    first._pp_send_pyobj_to_next_stage(first._pp_pd_get_prealloc_ids())
    good, bad = last._pp_pd_get_prealloc_ids()
    assert (good, bad) == (["request-0"], [])
    for at in failing:
        fail_alone(wanted[at])
    pair.compute(sent, PAGES, 16, TOKENS, is_last=True)
    pair.load(wanted, OTHERS, TOKENS)
    pair.until_over(*wanted)
    stages = ring(wanted)
    until(lambda: _left(stages) == [0, 0], lambda: _pass(stages))
    assert [each.requests[0].events for each in stages] == [["freed"]] * 2
    for each in sent:
        each.abort()


@pytest.fixture
def prefills(ring):
    with closing(Pair(Model(), prefill={"pp_size": 2})) as made:
        for rank in made.prefill.ranks:
            rank.is_dummy_cp_rank = True  # its bytes are not counted
        yield made


def _prefill_scheduler(at, channels, sender):
    from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin

    class Scheduler(_stage_of(at, channels), SchedulerDisaggregationPrefillMixin):
        tree_cache = req_to_metadata_buffer_idx_allocator = Mock()

        def _release_aborted_request(self, req):
            req.events.append("aborted")

    scheduler = Scheduler()
    scheduler.request = Mock(
        rid="request", disagg_kv_sender=sender, events=[], finished_reason=None
    )
    scheduler.request.pending_bootstrap = scheduler.request.return_routed_experts = False
    scheduler.disagg_prefill_inflight_queue = [scheduler.request]
    return scheduler


def _prefill_pass(stages):
    first, last = stages
    first._pp_send_pyobj_to_next_stage(first._pp_pd_get_prefill_transferred_ids())
    listed = last._pp_pd_get_prefill_transferred_ids()
    for each in stages:
        each.process_disagg_prefill_inflight_queue(listed)


@pytest.mark.parametrize("failing", FAILING, ids=str)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_prompt_that_a_stage_fails_is_released_in_all(prefills, monkeypatch, failing, moment):
    """Each stage ends it, and its decode engine fails it. Whether a client of the prefill engine itself learns of it
    depends on the first stage alone, as with SGLang's own backends.
    """
    from sglang.srt.disaggregation import prefill

    monkeypatch.setattr(prefill, "get_parallel", lambda: SimpleNamespace(tp_rank=0, pp_rank=0))
    monkeypatch.setattr(
        prefill, "release_kv_cache", lambda req, *_, **__: req.events.append("freed")
    )
    monkeypatch.setattr(prefill, "maybe_release_metadata_buffer", lambda *_: None)
    sent, wanted = prefills.send(45), prefills.want(45)
    for name, start, stop in zip(MOMENTS, (0, 16, TOKENS), (16, TOKENS, TOKENS), strict=True):
        if name == moment:
            for at in failing:
                sent[at].fail(BlockIdError("no such block"))
        if start < TOKENS:
            prefills.compute(sent, PAGES, start, stop, is_last=stop == TOKENS)
    prefills.load(wanted, OTHERS, TOKENS)
    assert {*prefills.until_over(*wanted)} == {Stage.FAILED}
    channels = [deque() for _ in range(2)]
    stages = [_prefill_scheduler(at, channels, each) for at, each in enumerate(sent)]
    until(
        lambda: not any(each.disagg_prefill_inflight_queue for each in stages),
        lambda: _prefill_pass(stages),
    )
    assert all("freed" in each.request.events for each in stages)
    failed = [at for at, each in enumerate(stages) if "aborted" in each.request.events]
    assert {*failing} <= {*failed}
