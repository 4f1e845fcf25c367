"""The scheduler: batching, chunks, preemption, remote loads, held blocks, aborts."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import LocalError
from kvconnector.integrations.identity import GREEDY, Identity, PromptEnd, digest_of
from kvconnector.session.completion import KVOutputAggregator, WorkerOutput
from minillm.request import Request, RequestState, RequestUpdate
from minillm.transfer import TransferEvents
from tests.support.examples import examples
from tests.unit.minillm.engine_fakes import (
    OFFERED,
    REMOTE,
    FakeRanks,
    continuation,
    make,
    request,
    run_step,
)


def test_a_failed_load_fails_the_request_by_policy():
    scheduler, _ = make(policy="fail")
    scheduler.add(request("r", 9, params=REMOTE))
    failed = TransferEvents(
        finished_recving=frozenset({"r"}), failed_recving={"r": "the lease expired"}
    )
    assert run_step(scheduler, failed) == [
        RequestUpdate(request_id="r", finish_reason="error", error="the lease expired")
    ]
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
def test_requests_that_can_never_be_served_are_refused(prompt, max_tokens, why):
    scheduler, transfer = make(num_blocks=16)
    with pytest.raises(LocalError, match=why):
        scheduler.add(request("a", prompt, max_tokens, REMOTE))
    assert not scheduler.has_requests
    assert transfer.aborted == ["a"]


def test_more_answers_than_can_run_are_refused():
    scheduler, _ = make(max_running=2)
    with pytest.raises(LocalError, match="many answers"):
        scheduler.add(Request("a", [1], 1, num_answers=3))
    with pytest.raises(LocalError, match="many answers"):
        scheduler.add(Request("a", [1], 1, kv_transfer_params=OFFERED, num_answers=2))
    scheduler.add(Request("b", [1], 3, num_answers=2))
    scheduler.add(Request("c", [1], 3))
    run_step(scheduler)
    assert scheduler.requests["c"].state is RequestState.WAITING


def random_requests(rng):
    """Draw local, remote and offered requests, whose prompts often share a prefix."""
    stem = [rng.randrange(2) for _ in range(20)]
    params = {"local": None, "remote": REMOTE, "offer": OFFERED}
    requests = {}
    for index in range(rng.randint(1, 7)):
        kind = rng.choice(sorted(params))
        length = rng.randint(1, 20)
        shared = rng.randint(0, length)
        prompt = stem[:shared] + [10 + index] * (length - shared)
        count = 1 if kind == "offer" else rng.randint(1, 12)
        name = f"{kind}{index}"
        answers = 1 if kind == "offer" else rng.choice([1, 1, 2, 3])
        stop = frozenset({rng.randrange(12)})
        requests[name] = Request(
            name, prompt, count, stop, kv_transfer_params=params[kind], num_answers=answers
        )
    return requests


class Loads:
    """Loads of two ranks, which may fail after different numbers of tokens."""

    def __init__(self, ranks, transfer):
        self.ranks, self.transfer = ranks, transfer
        self.aggregator = KVOutputAggregator(2)
        self.num_valid = {}

    def report(self, request, *num_valid):
        """End a load on one or both ranks with some leading tokens valid. Returns the engine's events."""
        target, _ = self.transfer.loads[request.request_id]
        outputs = [None, None]
        known = self.num_valid.setdefault(request.request_id, [])
        for count in num_valid:
            invalid = self.ranks.invalid_blocks(request, target, count)
            outputs[len(known)] = WorkerOutput(
                finished_recving=frozenset({request.request_id}),
                failed_recving={request.request_id: "lost"} if invalid else {},
                invalid_block_ids=invalid,
            )
            known.append(count)
        if len(known) == 2:
            self.ranks.load(request, target, min(self.num_valid.pop(request.request_id)))
        return self.aggregator.aggregate([each or WorkerOutput() for each in outputs])


@pytest.mark.parametrize("num_valid", [(18, 6), (6, 18), (18, 13), (18, 18), (10, 6), (0, 18)])
@pytest.mark.parametrize("together", [True, False])
def test_a_load_that_failed_is_computed_again_from_its_first_invalid_block_on(num_valid, together):
    """Four of its tokens were here before. No rank's invalid blocks may be lost, whichever rank is the last."""
    scheduler, transfer = make()
    ranks = FakeRanks(scheduler)
    loads = Loads(ranks, transfer)
    load = Request("load", list(range(19)), 3, kv_transfer_params=REMOTE)
    scheduler.add(Request("prefix", [*range(4), 99], 1))
    step = scheduler.schedule()
    scheduler.update(step.inputs, ranks.run(step), TransferEvents())
    scheduler.add(load)
    assert not scheduler.schedule().inputs
    held = scheduler.blocks.tables("load")
    for ended in [num_valid] if together else [[each] for each in num_valid]:
        output = loads.report(load, *ended)
        events = TransferEvents(
            finished_recving=output.finished_recving,
            failed_recving=output.failed_recving,
            invalid_blocks=output.invalid_block_ids,
        )
        assert scheduler.update([], {}, events) == []
    step = scheduler.schedule()
    (item,) = step.inputs
    assert item.start == max(4, min(num_valid) // 4 * 4 if min(num_valid) < 18 else 18)
    assert scheduler.blocks.tables("load") == held
    outputs = []
    while scheduler.has_requests:
        tokens = ranks.run(step)
        outputs += scheduler.update(step.inputs, tokens, TransferEvents())
        step = scheduler.schedule()
    assert [each.token.token_id for each in outputs] == continuation(load)


def random_events(rng, loads, requests):
    """Draw events: ranks end some loads, well or badly, and consumers have read some held requests."""
    ranks, transfer = loads.ranks, loads.transfer
    known = ranks.scheduler.requests
    loading = {RequestState.WAITING_FOR_REMOTE_KV, RequestState.DRAINING}
    output = WorkerOutput()
    for name, item in known.items():
        if item.state in loading:
            ended = rng.choice([0, 1, 2 - len(loads.num_valid.get(name, ()))])
            counts = [rng.choice([99, rng.randint(0, item.num_computed)]) for _ in range(ended)]
            output = output.merged(loads.report(requests[name], *counts))
    held = [name for name, item in known.items() if item.state is RequestState.HELD]
    for name in held:
        offer, num_tokens = transfer.offers[name]
        prompt = requests[name].prompt
        ranks.check_offer(prompt, offer, num_tokens)
        computed = Identity(len(prompt), digest_of(prompt), {})
        token, *_ = continuation(requests[name])
        assert PromptEnd.decode(transfer.ends[name]) == PromptEnd(
            token, GREEDY, len(prompt), computed
        )
    sent = [name for name in held if rng.random() < 0.3]
    return TransferEvents(
        frozenset(sent), output.finished_recving, output.failed_recving, output.invalid_block_ids
    )


@examples(150)
@given(
    num_blocks=st.integers(10, 15),
    host=st.sampled_from([0, 4, 12]),
    budget=st.integers(1, 20),
    architecture=st.sampled_from(["llama", "hybrid", "chunked-local", "mamba"]),
    prefix=st.booleans(),
    lookahead=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 1 << 32),
)
def test_every_request_ends_with_the_right_tokens_and_no_block_is_lost(
    *, num_blocks, host, budget, architecture, prefix, lookahead, seed
):
    """Any mix of local, remote, offered, failing, forking and aborted requests, in a pool too small for all of them.

    The ranks check in every step that each sequence finds its own tokens, whatever was shared, swapped or loaded.
    """
    rng = random.Random(seed)
    scheduler, transfer = make(
        num_blocks,
        budget,
        host=host,
        architecture=architecture,
        max_running=4,
        prefix=prefix,
        lookahead=lookahead,
    )
    ranks = FakeRanks(scheduler)
    loads = Loads(ranks, transfer)
    num_free = scheduler.blocks.get_num_free_gpu_blocks()
    requests = random_requests(rng)
    expected = {
        (name, answer): continuation(each, answer)
        for name, each in requests.items()
        for answer in range(each.num_answers)
    }
    outputs = {key: [] for key in expected}
    coming, aborted = list(requests.values()), set()
    for _ in range(2000):
        while coming and rng.random() < 0.5:
            scheduler.add(coming.pop(0))
        if not scheduler.has_requests and not coming:
            break
        step = scheduler.schedule()
        tokens = ranks.run(step)
        if scheduler.requests and rng.random() < 0.05:  # an abort may arrive while a step runs
            name = rng.choice(sorted(requests))
            aborted.add(name)
            scheduler.abort(name)
        events = random_events(rng, loads, requests)
        for update in scheduler.update(step.inputs, tokens, events):
            outputs[update.request_id, update.answer].append(update.token.token_id)
    assert not scheduler.has_requests
    assert scheduler.blocks.get_num_free_gpu_blocks() == num_free
    for (name, answer), output in outputs.items():
        wanted = expected[name, answer]
        assert output == (wanted[: len(output)] if name in aborted else wanted)


def test_a_prompt_is_found_again_once_all_ranks_have_stored_it():
    scheduler, _ = make()
    for name, stored, hit in (("a", frozenset(), 0), ("b", frozenset({"b:9"}), 0), ("c", None, 8)):
        scheduler.add(Request(name, list(range(9)), 1))
        assert scheduler.blocks.find_hit(name) == hit
        run_step(scheduler, TransferEvents(stored=stored))
