"""The pipeline stages of a decode engine release or fail a request in all of them. SGLang's part is imitated here, and
done by its own code in `tests/sglang/test_stages.py`.
"""

from contextlib import closing
from types import SimpleNamespace

import pytest

from kvconnector.integrations.sglang.stages import list_successes, release_alike
from kvconnector.integrations.sglang.transfers import Stage
from tests.sglang.pure.engines import Pair, error_of, fail_alone, loaded
from tests.sglang.pure.pools import Model

pytestmark = pytest.mark.ucx

PAGES, OTHERS, TOKENS = [1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 18
OF_ENDED = [Stage.DONE, Stage.FAILED]


@pytest.fixture
def pair():
    with closing(Pair(Model(), decode={"pp_size": 2})) as made:
        yield made


class Scheduler:
    """A stage's scheduler: what is in its queue of transfers, and what it has released and failed."""

    def __init__(self, **receivers):
        queue = [
            SimpleNamespace(req=SimpleNamespace(rid=rid), kv_receiver=each)
            for rid, each in receivers.items()
        ]
        self.disagg_decode_transfer_queue = SimpleNamespace(queue=queue)
        self.done, self.failed = [], []

    def list(self):
        queue = self.disagg_decode_transfer_queue.queue
        return list_successes(_ids_of, self, queue, False, OF_ENDED)

    def release(self, listed):
        return release_alike(_release, self, listed)


def _ids_of(scheduler, requests, is_send, *wanted):
    polled = [(each.req.rid, each.kv_receiver.poll()) for each in requests]
    found = tuple([rid for rid, stage in polled if stage in stages] for stages in wanted)
    return found if len(found) > 1 else found[0]


def _release(scheduler, listed):
    if listed is None:
        return None
    queue = scheduler.disagg_decode_transfer_queue
    left, done = [], []
    for each in queue.queue:
        stage = each.kv_receiver.poll() if each.req.rid in listed else None
        if stage is Stage.DONE:
            done.append(each.req.rid)
        elif stage is Stage.FAILED:
            scheduler.failed.append(each.req.rid)
        else:
            left.append(each)
    scheduler.done += done
    queue.queue = left
    return done


def _go_round(stages):
    """Let SGLang's lists pass through all stages, and then to each of them."""
    listed = stages[0].list()
    for stage in stages[1:]:
        listed = [*({*listed} & {*stage.list()})]
    for stage in stages:
        listed = stage.release(listed)
    return listed


@pytest.mark.parametrize("failing", [(), (0,), (1,), (0, 1)], ids=str)
def test_all_stages_release_a_request_or_all_fail_it(pair, failing):
    wanted = loaded(pair, 30, PAGES, OTHERS, TOKENS)
    for at in failing:
        fail_alone(wanted[at])
    stages = [Scheduler(one=each) for each in wanted]
    listed = _go_round(stages)
    assert [each.done for each in stages] == [[] if failing else ["one"]] * 2
    assert [each.failed for each in stages] == [["one"] if failing else []] * 2
    assert not any(each.disagg_decode_transfer_queue.queue for each in stages)
    assert {*listed} == ({"one"} if failing else {"one", ("one",)})
    if failing:
        errors = [error_of(each) for each in wanted]
        others = [hasattr(each, "is_from_another_rank") for each in errors]
        assert others == [at not in failing for at in range(2)]
    assert all(rank.is_abort_release_safe(30) for rank in pair.decode.ranks)


def test_a_request_that_has_not_ended_in_every_stage_stays(pair):
    sent, wanted = pair.send(31), pair.want(31)
    pair.compute(sent, PAGES, 0, 16)
    pair.load(wanted, OTHERS, TOKENS)
    done = loaded(pair, 32, PAGES, OTHERS, TOKENS)
    fail_alone(wanted[1])
    stages = [Scheduler(one=each, two=other) for each, other in zip(wanted, done, strict=True)]
    assert {*_go_round(stages)} == {"two", ("two",)}
    assert [each.done for each in stages] == [["two"]] * 2
    assert wanted[0].poll() is Stage.TRANSFERRING
    assert _go_round(stages) == []  # a list that names what has gone already changes nothing
    assert stages[0].release(["two"]) == []
    assert stages[0].release(["one", ("one",)]) == []  # SGLang may keep what is listed in its queue
    wanted[0].abort()
    pair.until_over(wanted[0])
    assert _go_round(stages) == ["one"]
    assert [each.failed for each in stages] == [["one"]] * 2
    for each in sent:
        each.abort()


def test_other_lists_of_sglang_are_its_own():
    """Those of prefill engines, those before a transfer, and none before the first has gone round."""
    requests = [SimpleNamespace(req=SimpleNamespace(rid="one"), kv_receiver=SimpleNamespace())]
    requests[0].kv_receiver.poll = lambda: Stage.WAITING
    asked = ([Stage.WAITING], [Stage.FAILED])
    assert list_successes(_ids_of, None, requests, False, *asked) == (["one"], [])
    assert list_successes(_ids_of, None, requests, True, [Stage.WAITING]) == ["one"]
    assert Scheduler().release(None) is None
