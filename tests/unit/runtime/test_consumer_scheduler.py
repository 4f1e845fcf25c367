from __future__ import annotations

import pytest

from kvconnector.config import ConnectorConfig
from kvconnector.errors import BlockIdError, GeometryError, LocalError, UnknownRequestError
from kvconnector.runtime import KVConsumerScheduler, TransferParams, WorkerMetadata
from kvconnector.session import WorkerOutput
from kvconnector.testing.fakes import EngineShape, attention_model

CONFIG = ConnectorConfig.from_mapping({"engine_id": "d", "control": {"insecure": True}})
PARAMS = TransferParams(
    remote_engine_id="p",
    remote_request_id="r",
    remote_block_ids=[[1, 2]],
    remote_host="::1",
    remote_port=5,
    remote_num_tokens=8,
    transfer_secret="5" * 32,
).to_mapping()


def _metadata():
    geometry = EngineShape("d", attention_model()).geometry()
    return [
        WorkerMetadata(
            engine_id="d",
            pp_rank=0,
            tp_rank=0,
            geometry=geometry.ranks[0],
            model=geometry.model,
            control_address="tcp://127.0.0.1:1",
            public_key="",
            incarnation="one",
        )
    ]


@pytest.fixture
def scheduler():
    made = KVConsumerScheduler(CONFIG)
    made.set_worker_metadata(_metadata(), tp_size=1, pp_size=1)
    return made


def _start(scheduler, name="w", computed=0):
    scheduler.on_new_request(name, PARAMS)
    count, is_async = scheduler.get_num_new_matched_tokens(
        name, num_prompt_tokens=8, num_computed_tokens=computed
    )
    assert is_async == (count > 0)
    scheduler.update_state_after_alloc(name, block_ids=[[4, 5]], num_external_tokens=count)
    return count


def _done(*names):
    return WorkerOutput(finished_recving=frozenset(names))


def test_the_last_prompt_token_and_what_is_computed_stay_here(scheduler):
    assert _start(scheduler, computed=3) == 4
    step = scheduler.build_step()
    assert step.engine is not None
    assert [load.token_ranges for load in step.loads] == [((3, 7),)]
    assert [want.address for want in step.wants] == ["tcp://[::1]:5"]
    assert scheduler.build_step().is_empty


def test_a_name_is_free_again_once_its_load_has_ended(scheduler):
    _start(scheduler)
    scheduler.build_step()
    scheduler.abort("w")
    scheduler.abort("w")
    assert scheduler.is_loading("w")
    assert scheduler.build_step().dropped == ("w",)
    with pytest.raises(LocalError, match="queued twice"):
        scheduler.on_new_request("w", PARAMS)
    scheduler.update(_done("w", "stranger"))
    assert not scheduler.is_loading("w")
    assert _start(scheduler) == 7


def test_a_request_that_ends_after_its_load_leaves_nothing(scheduler):
    _start(scheduler)
    scheduler.update(_done("w"))
    scheduler.request_finished("w")
    scheduler.request_finished("w")
    assert scheduler.build_step().dropped == ()
    assert _start(scheduler) == 7


def test_a_full_local_hit_gives_the_blocks_back(scheduler):
    assert _start(scheduler, computed=7) == 0
    assert scheduler.build_step().dropped == ("w",)


def test_mistakes_are_refused_before_anything_changes(scheduler):
    scheduler.on_new_request("w", PARAMS)
    for blocks in ([[1], [2]], [[-1]]):
        with pytest.raises(BlockIdError):
            scheduler.update_state_after_alloc("w", block_ids=blocks, num_external_tokens=3)
    scheduler.update_state_after_alloc("w", block_ids=[[1, 2]], num_external_tokens=3)
    with pytest.raises(UnknownRequestError):
        scheduler.update_state_after_alloc("w", block_ids=[[1, 2]], num_external_tokens=3)


def test_metadata_comes_first_and_windows_fit_it():
    early = KVConsumerScheduler(CONFIG)
    with pytest.raises(LocalError, match="worker metadata comes before"):
        early.on_new_request("w", PARAMS)
    early.on_new_request("w", {"do_remote_decode": True})
    with pytest.raises(GeometryError, match="one window per cache group"):
        KVConsumerScheduler(CONFIG, [None, 4]).set_worker_metadata(
            _metadata(), tp_size=1, pp_size=1
        )


def test_only_what_a_window_still_sees_is_loaded():
    scheduler = KVConsumerScheduler(CONFIG, [4])
    scheduler.set_worker_metadata(_metadata(), tp_size=1, pp_size=1)
    _start(scheduler)
    assert scheduler.build_step().loads[0].token_ranges == ((4, 7),)
