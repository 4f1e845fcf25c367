"""The scheduler: batching, chunks, preemption, remote loads, held blocks, aborts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import LocalError
from minillm.blocks import BlockManager
from minillm.config import FailurePolicy
from minillm.messages import SampledToken, SequenceInput
from minillm.scheduler import Request, RequestState, RequestUpdate, Scheduler
from minillm.transfer import NoTransfer, Params, TransferEvents

REMOTE: Params = {"do_remote_prefill": True}
NO_EVENTS = TransferEvents()


class RecordingTransfer(NoTransfer):
    """Matches all but the last prompt token of requests with params; keeps blocks when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: dict[str, tuple[list[int], int]] = {}
        self.finished_with: dict[str, tuple[list[int], int]] = {}
        self.aborted: list[str] = []

    def matched_tokens(self, request_id: str, num_prompt: int, params: Params) -> tuple[int, bool]:
        return (num_prompt - 1, True) if params == REMOTE else (0, False)

    def after_alloc(self, request_id: str, block_ids: list[int], num_external: int) -> None:
        self.loads[request_id] = (block_ids, num_external)

    def finished(
        self, request_id: str, block_ids: list[int], num_tokens: int, params: Params
    ) -> tuple[bool, Params]:
        self.finished_with[request_id] = (block_ids, num_tokens)
        hold = params == {"do_remote_decode": True}
        return hold, {"remote_request_id": request_id} if hold else None

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)


def make(
    num_blocks: int = 32, budget: int = 64, policy: FailurePolicy = "recompute", **limits: int
) -> tuple[Scheduler, RecordingTransfer]:
    transfer = RecordingTransfer()
    blocks = BlockManager(block_size=4, num_blocks=num_blocks, watermark=0.0, scatter_seed=1)
    scheduler = Scheduler(
        blocks,
        transfer,
        max_model_len=limits.get("max_model_len", 100),
        max_batched_tokens=budget,
        max_running=limits.get("max_running", 8),
        failure_policy=policy,
    )
    return scheduler, transfer


def token_for(item: SequenceInput) -> SampledToken:
    """A sampled token that depends on the position alone, so that a recomputed request continues the same."""
    return SampledToken(1000 + item.start + len(item.token_ids), -1.0)


def run_step(
    scheduler: Scheduler, events: TransferEvents = NO_EVENTS
) -> tuple[list[SequenceInput], list[RequestUpdate]]:
    inputs = scheduler.schedule()
    tokens = {item.request_id: token_for(item) for item in inputs if item.sample}
    return inputs, scheduler.update(inputs, tokens, events)


def request(name: str, prompt: int, max_tokens: int = 4, params: Params = None) -> Request:
    return Request(name, list(range(prompt)), max_tokens, kv_transfer_params=params)


def test_prefill_and_decode_share_a_step_within_the_budget() -> None:
    scheduler, _ = make(budget=10)
    scheduler.add(request("a", 6))
    inputs, updates = run_step(scheduler)
    assert [(item.request_id, len(item.token_ids)) for item in inputs] == [("a", 6)]
    assert updates[0].token == SampledToken(1006, -1.0)
    scheduler.add(request("b", 15))
    inputs, updates = run_step(scheduler)
    shares = [(item.request_id, item.start, len(item.token_ids), item.sample) for item in inputs]
    assert shares == [("a", 6, 1, True), ("b", 0, 9, False)]
    assert inputs[0].token_ids == [1006]
    inputs, updates = run_step(scheduler)
    shares = [(item.request_id, item.start, len(item.token_ids), item.sample) for item in inputs]
    assert shares == [("a", 7, 1, True), ("b", 9, 6, True)]
    assert [update.request_id for update in updates] == ["a", "b"]


def test_a_finished_request_returns_its_blocks() -> None:
    scheduler, transfer = make()
    scheduler.add(request("a", 5, max_tokens=2))
    run_step(scheduler)
    _, updates = run_step(scheduler)
    assert updates[0].finish_reason == "length"
    assert scheduler.blocks.get_num_free_gpu_blocks() == 32
    assert not scheduler.has_requests
    assert transfer.finished_with["a"][1] == 5


def test_a_stop_token_ends_the_request() -> None:
    scheduler, _ = make()
    scheduler.add(Request("a", [1, 2, 3], 10, frozenset({1004})))
    run_step(scheduler)
    _, updates = run_step(scheduler)
    assert updates[0].token == SampledToken(1004, -1.0)
    assert updates[0].finish_reason == "stop"


def test_preempted_requests_are_recomputed_with_the_tokens_they_had() -> None:
    scheduler, _ = make(num_blocks=4)
    scheduler.add(request("a", 8, max_tokens=8))
    scheduler.add(request("b", 7, max_tokens=5))
    seen: dict[str, list[int]] = {"a": [], "b": []}
    b_states = set()
    while scheduler.has_requests:
        _, updates = run_step(scheduler)
        if "b" in scheduler.requests:
            b_states.add(scheduler.requests["b"].state)
        for update in updates:
            assert update.token is not None
            seen[update.request_id].append(update.token.token_id)
    assert RequestState.WAITING in b_states
    assert seen == {"a": list(range(1008, 1016)), "b": list(range(1007, 1012))}
    assert scheduler.blocks.get_num_free_gpu_blocks() == 4


def test_a_remote_prompt_waits_while_others_run_and_computes_one_token() -> None:
    scheduler, transfer = make()
    scheduler.add(request("remote", 9, params=REMOTE))
    scheduler.add(request("local", 3))
    inputs, _ = run_step(scheduler)
    assert [item.request_id for item in inputs] == ["local"]
    table, external = transfer.loads["remote"]
    assert (len(table), external) == (3, 8)
    events = TransferEvents(finished_recving=frozenset({"remote"}))
    run_step(scheduler, events)
    inputs, _ = run_step(scheduler)
    share = next(item for item in inputs if item.request_id == "remote")
    assert (share.start, share.token_ids, share.block_ids, share.sample) == (8, [8], table, True)


def test_a_failed_load_is_recomputed_in_the_same_blocks() -> None:
    scheduler, transfer = make(policy="recompute")
    scheduler.add(request("r", 9, params=REMOTE))
    failed = TransferEvents(
        finished_recving=frozenset({"r"}), failed_recving={"r": "the lease expired"}
    )
    run_step(scheduler, failed)
    inputs, updates = run_step(scheduler)
    assert (inputs[0].start, len(inputs[0].token_ids)) == (0, 9)
    assert inputs[0].block_ids == transfer.loads["r"][0]
    assert updates[0].finish_reason is None


def test_a_failed_load_fails_the_request_by_policy() -> None:
    scheduler, _ = make(policy="fail")
    scheduler.add(request("r", 9, params=REMOTE))
    failed = TransferEvents(
        finished_recving=frozenset({"r"}), failed_recving={"r": "the lease expired"}
    )
    _, updates = run_step(scheduler, failed)
    assert updates == [
        RequestUpdate(request_id="r", finish_reason="error", error="the lease expired")
    ]
    assert scheduler.blocks.get_num_free_gpu_blocks() == 32


def test_an_aborted_load_keeps_its_blocks_until_the_connector_lets_go() -> None:
    scheduler, transfer = make()
    scheduler.add(request("r", 9, params=REMOTE))
    run_step(scheduler)
    scheduler.abort("r")
    scheduler.abort("r")
    run_step(scheduler)
    assert transfer.aborted == ["r"]
    assert scheduler.blocks.get_num_free_gpu_blocks() == 29
    run_step(scheduler, TransferEvents(finished_recving=frozenset({"r"})))
    assert scheduler.blocks.get_num_free_gpu_blocks() == 32
    assert not scheduler.has_requests


def test_a_producer_holds_blocks_until_they_were_sent_also_after_an_abort() -> None:
    scheduler, transfer = make()
    scheduler.add(request("p", 9, max_tokens=1, params={"do_remote_decode": True}))
    _, updates = run_step(scheduler)
    assert updates[0].kv_transfer_params == {"remote_request_id": "p"}
    scheduler.abort("p")
    inputs, _ = run_step(scheduler)
    assert inputs == []
    assert transfer.aborted == ["p"]
    assert scheduler.blocks.get_num_free_gpu_blocks() == 29
    run_step(scheduler, TransferEvents(finished_sending=frozenset({"p"})))
    assert scheduler.blocks.get_num_free_gpu_blocks() == 32


@pytest.mark.parametrize("started", [False, True], ids=["waiting", "running"])
def test_an_abort_while_a_step_runs_is_not_booked(started: bool) -> None:
    scheduler, _ = make()
    scheduler.add(request("a", 3))
    if started:
        run_step(scheduler)
    inputs = scheduler.schedule()
    scheduler.abort("a")
    tokens = {item.request_id: token_for(item) for item in inputs}
    assert scheduler.update(inputs, tokens, NO_EVENTS) == []
    assert scheduler.blocks.get_num_free_gpu_blocks() == 32


@pytest.mark.parametrize(
    "prompt,max_tokens,why",
    [
        (0, 1, "at least one"),
        (3, 0, "at least one"),
        (90, 20, "model's length"),
        (60, 9, "never fit"),
    ],
)
def test_requests_that_can_never_be_served_are_refused(
    prompt: int, max_tokens: int, why: str
) -> None:
    scheduler, transfer = make(num_blocks=16)
    with pytest.raises(LocalError, match=why):
        scheduler.add(request("a", prompt, max_tokens, REMOTE))
    assert not scheduler.has_requests
    assert transfer.aborted == ["a"]


def test_max_running_counts_loads_too() -> None:
    scheduler, _ = make(max_running=2)
    for name in ("a", "b", "c"):
        scheduler.add(request(name, 5, params=REMOTE))
    run_step(scheduler)
    states = {name: item.state for name, item in scheduler.requests.items()}
    assert states["c"] is RequestState.WAITING
    assert states["b"] is RequestState.WAITING_FOR_REMOTE_KV


@given(data=st.data())
def test_every_request_ends_with_the_right_tokens_and_no_block_is_lost(data: st.DataObject) -> None:
    """Any mix of local, remote, failing and aborted requests, in a pool too small for all of them."""
    scheduler, _ = make(num_blocks=12, budget=data.draw(st.integers(1, 20)), max_running=4)
    kinds = data.draw(st.lists(st.sampled_from(["local", "remote"]), min_size=1, max_size=7))
    wanted = {}
    for index, kind in enumerate(kinds):
        name, prompt = f"{kind}{index}", data.draw(st.integers(1, 20))
        wanted[name] = (prompt, data.draw(st.integers(1, 12)))
        params: dict[str, Any] | None = REMOTE if kind == "remote" else None
        scheduler.add(request(name, prompt, wanted[name][1], params))
    seen: dict[str, list[int]] = {name: [] for name in wanted}
    aborted = set()
    for _ in range(2000):
        if not scheduler.has_requests:
            break
        loading = [
            name
            for name, item in scheduler.requests.items()
            if item.state in {RequestState.WAITING_FOR_REMOTE_KV, RequestState.DRAINING}
        ]
        done = frozenset(name for name in loading if data.draw(st.booleans()))
        failed = {name: "lost" for name in done if data.draw(st.booleans())}
        _, updates = run_step(
            scheduler, TransferEvents(finished_recving=done, failed_recving=failed)
        )
        for update in updates:
            assert update.token is not None
            seen[update.request_id].append(update.token.token_id)
        if scheduler.requests and data.draw(st.integers(0, 9)) == 0:
            victim = data.draw(st.sampled_from(sorted(scheduler.requests)))
            scheduler.abort(victim)
            aborted.add(victim)
    assert not scheduler.has_requests
    assert scheduler.blocks.get_num_free_gpu_blocks() == 12
    for name, (prompt, count) in wanted.items():
        expected = [1000 + prompt + index for index in range(count)]
        assert seen[name] == (expected[: len(seen[name])] if name in aborted else expected)
