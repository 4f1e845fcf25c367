"""What the scheduler half remembers of requests."""

from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig

from kvconnector.integrations.vllm.tracking import IdleSteps, PartlyFilled, Reports, Siblings

pytestmark = pytest.mark.vllm


def test_the_last_reports_are_remembered_and_older_ones_forgotten():
    reports = Reports(capacity=2)
    reports.add(["a", "b"])
    reports.add(["a"])  # again: now b is the oldest
    reports.add(["c"])
    assert reports.repeated({"a", "b", "c", "d"}) == {"a", "c"}
    reports.forget("a")
    assert reports.repeated({"a", "c"}) == {"c"}


def test_the_first_reason_counts_and_is_told_once():
    reports = Reports()
    reports.explain("r", "first")
    reports.explain("r", "second")
    assert [reports.take_reason("r") for _ in range(2)] == ["first", ""]


def test_siblings_wait_for_the_one_that_reads():
    siblings = Siblings()
    assert [siblings.add(name, "p", "t") for name in ("a", "b")] == [True, False]
    assert siblings.add("c", "p", "another")
    assert siblings.add("d", "other engine", "t")
    assert [siblings.first_of(name) for name in "abcd"] == [None, "a", None, None]
    siblings.remove("b")
    assert siblings.first_of("b") is None
    siblings.remove("a")
    assert siblings.add("e", "p", "t")  # its source may be named again


@pytest.mark.parametrize(
    "options, idle",
    [
        ({}, [False, True]),
        ({"asynchronous": True}, [False, False, True]),
        ({"pp": 3}, [False] * 3 + [True]),
        ({"pp": 3, "asynchronous": True, "is_v2": True}, [False] * 4 + [True]),
    ],
)
def test_a_step_is_idle_once_no_step_in_flight_computes(options, idle):
    steps = IdleSteps(config_of(**options))
    assert steps.plan(0)
    assert [steps.plan(5), *(steps.plan(0) for _ in idle[1:])] == idle


def test_a_data_parallel_rank_is_never_idle_because_others_wait_for_its_steps():
    steps = IdleSteps(config_of(dp=2))
    assert not any(steps.plan(0) for _ in range(4))


def config_of(*, asynchronous=False, pp=1, dp=1, is_v2=False):
    """Return a configuration with vLLM's own number of steps in flight. Its second model runner adds one to that of
    pipeline stages.
    """
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=pp, data_parallel_size=dp),
        scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        use_v2_model_runner=is_v2,
    )
    config.max_concurrent_batches = VllmConfig.max_concurrent_batches.fget(config)
    return config


def test_a_long_prompt_s_blocks_are_not_all_looked_at():
    """A prompt of a million tokens has 65,536 of them, and the scheduler would begin no step meanwhile."""

    class Table(list):
        def __getitem__(self, place):
            looked.add(place)
            return super().__getitem__(place)

    looked = set()
    partly = PartlyFilled()
    partly._groups = [SimpleNamespace(vllm_group=0, row_tokens=1, keeps="window")]
    partly.block_tokens = (16,)
    gone = SimpleNamespace(is_null=True, block_hash=None, block_id=0)
    kept = [SimpleNamespace(is_null=False, block_hash=None, block_id=each) for each in range(1, 4)]
    partly.expect("r", [(16 * 1002, 16 * 1003)], [Table([gone] * 1000 + kept)])
    assert sorted(partly._blocks["r"]) == [(0, 1000, 1), (0, 1001, 2)]
    assert looked == {999, 1000, 1001}
