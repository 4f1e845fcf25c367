"""Requests that several connectors load together, in vLLM's real scheduler beside its real `OffloadingConnector`."""

import random

import pytest
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base, multi_connector
from vllm.v1.kv_cache_interface import SlidingWindowSpec

import kvconnector.integrations.vllm as integration
from kvconnector.errors import ConfigError, LocalError
from kvconnector.integrations.vllm import MultiConnector, ranges
from kvconnector.integrations.vllm.connector import RIVALS
from kvconnector.integrations.vllm.messages import WorkerReport
from kvconnector.integrations.vllm.placement import Placement
from tests.vllm import scheduler_world as w
from tests.vllm.cache_world import SIZE, attention, placed

pytestmark = pytest.mark.vllm

TIER = {"beside": "OffloadingConnector", "is_ranged": True}
FAKE = {"beside": "KeepingConnector", "is_ranged": True}
SPLIT = 2 * SIZE


@pytest.fixture
def fake(monkeypatch):
    """Sets the tokens that the connector beside ours has of each prompt."""

    def set_(loads, *, is_async=True):
        monkeypatch.setattr(w.KeepingConnector, "loads", loads)
        monkeypatch.setattr(w.KeepingConnector, "is_async", is_async)

    return set_


def _loading(engine, stored=SPLIT, num_tokens=200, **changes):
    """Let only the tier have `stored` tokens of a prompt. Returns a request for it and its first step."""
    engine.add(stored, max_tokens=1, prompt=1)
    for _ in range(3):
        w.TierStep(engine)
    assert engine.scheduler.reset_prefix_cache()
    request = engine.add(num_tokens, w.offer(num_tokens, **changes), prompt=1)
    return request, {"finished_recving": {request.request_id}}, w.TierStep(engine)


@pytest.mark.parametrize("stored,split", [(31, 0), (32, 32), (64, 64), (95, 64), (200, 192)])
def test_a_prefix_comes_from_the_tier_and_the_rest_from_the_producer(world, stored, split):
    engine = world(**TIER)
    request, ended, step = _loading(engine, stored)
    assert [load.token_ranges for load in step.news.loads] == [((split, 199),)]
    (ids,) = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    of_tier = [ids[: split // SIZE]] if split else []
    assert [job.dst_spec.block_ids.tolist() for job in step.tier] == of_tier
    assert step.extra == ({request.request_id: 1} if split else {})
    assert request.status.name == "WAITING_FOR_REMOTE_KVS"
    assert w.TierStep(engine, **ended).extra == {}
    (output,) = w.TierStep(engine).outputs
    assert output.new_token_ids == [7]
    found = output.prefill_stats
    assert (found.num_local_cached_tokens, found.num_external_cached_tokens) == (0, 199)


def test_tokens_that_the_prefix_cache_has_are_not_loaded(world):
    engine = world(**TIER)
    _, ended, _ = _loading(engine, stored=128, num_tokens=40)
    for finished in (ended, {}, {}, {}):
        w.TierStep(engine, **finished)
    engine.add(200, w.offer(200, remote_request_id="other"), prompt=1)
    step = w.TierStep(engine)
    assert [load.token_ranges for load in step.news.loads] == [((128, 199),)]
    assert len(step.tier[0].dst_spec.block_ids) == 128 // SIZE - 1


def test_a_whole_prompt_in_the_tier_frees_the_producer(world):
    engine = world(**TIER)
    request, ended, step = _loading(engine, SPLIT + 1, SPLIT + 1)
    assert (step.news.loads, step.news.dropped) == ([], [request.request_id])
    assert (len(step.tier), step.extra) == (1, {})
    w.TierStep(engine, **ended)
    assert len(w.TierStep(engine).outputs) == 1


def test_the_tier_loads_nothing_before_the_producer_has_started(world):
    engine = world(**TIER)
    follows = {"transfer_id": "t", "remote_block_ids": None, "remote_request_id": None}
    request, _, step = _loading(engine, **follows)
    assert (step.news.loads, step.tier, engine.used_blocks) == ([], [], 0)
    w.TierStep(engine, WorkerReport({request.request_id}))
    step = w.TierStep(engine)
    assert [load.token_ranges for load in step.news.loads] == [((SPLIT, 200),)]
    assert len(step.tier) == 1


@pytest.mark.parametrize("stored, is_loaded", [(0, True), (SPLIT, True), (0, False)])
def test_a_load_waits_for_stores_that_read_its_blocks(world, monkeypatch, stored, is_loaded):
    """As a prompt that is computed does: else the tier would store, under the earlier request's key, what is loaded."""
    monkeypatch.setattr(w, "NUM_BLOCKS", 9)
    engine = world(**TIER)
    if stored:  # the tier has a part of the second prompt
        engine.add(stored, max_tokens=1, prompt=2)
        for _ in range(3):
            w.TierStep(engine)
        assert engine.scheduler.reset_prefix_cache()
    earlier = engine.add(6 * SIZE, max_tokens=1, prompt=1)
    jobs = {}
    while not earlier.is_finished():  # no worker reports that its store has ended
        planned = engine.scheduler.schedule()
        jobs |= planned.kv_connector_metadata.metadata[0].store_jobs
        engine.complete(planned)
    planned = engine.scheduler.schedule()
    jobs |= planned.kv_connector_metadata.metadata[0].store_jobs
    engine.complete(planned)
    stored_blocks = {int(each) for job in jobs.values() for each in job.src_spec.block_ids}
    later = engine.add(7 * SIZE, w.offer(7 * SIZE) if is_loaded else None, prompt=2)
    planned = engine.scheduler.schedule()
    (ids,) = engine.scheduler.kv_cache_manager.get_block_ids(later.request_id)
    assert stored_blocks.intersection(ids)
    assert planned.kv_connector_metadata.metadata[0].jobs_to_flush == set(jobs)
    if is_loaded:
        assert len(engine.news(planned).loads) == 1


@pytest.mark.skipif(
    vllm.__version__.startswith("0.33"), reason="vLLM 0.33 fences all blocks itself"
)
def test_a_load_waits_for_no_store_of_blocks_that_it_does_not_write(world):
    engine = world(**TIER)
    engine.add(2 * SIZE, max_tokens=1, prompt=1)
    engine.step()
    engine.add(6 * SIZE, w.offer(6 * SIZE), prompt=1)
    planned = engine.scheduler.schedule()
    (load,) = engine.news(planned).loads
    assert load.token_ranges == ((2 * SIZE, 6 * SIZE - 1),)
    assert planned.kv_connector_metadata.metadata[0].jobs_to_flush == set()


@pytest.mark.parametrize("backend", ["native", "lmcache"])
@pytest.mark.parametrize("beside", [{}, FAKE])
def test_an_option_that_replaces_the_connector_is_refused(model, backend, beside):
    engine = {"kv_offloading_size": 1, "kv_offloading_backend": backend}
    with pytest.raises(ConfigError, match="--kv-offloading-size replaces kvconnector's connector"):
        w.vllm_config(model, engine=engine, **beside)


def test_statistics_of_a_child_that_is_found_by_its_path_need_no_plugin(monkeypatch):
    """Else the first load would end vLLM's API server, which looks the child's class up by name."""
    monkeypatch.delitem(KVConnectorFactory._registry, "KVConnector", raising=False)
    child = {"kv_connector": "KVConnector", "kv_connector_module_path": integration.__name__}
    KVConnectorFactory.get_connector_class(KVTransferConfig(kv_role="kv_both", **child))
    data = {"KVConnector": {"transfer_duration": [1.0], "bytes_transferred": [1]}}
    for multi in (multi_connector.MultiConnector, MultiConnector):
        found = multi.build_kv_connector_stats(data).reduce()
        assert found["KVConnector"]["Num successful transfers"] == 1


def test_a_tier_that_records_its_blocks_in_another_way_is_refused(model, monkeypatch):
    from vllm.distributed.kv_transfer.kv_connector.v1 import offloading_connector

    monkeypatch.setattr(
        offloading_connector, "OffloadingConnectorScheduler", lambda *_, **__: object()
    )
    config = w.vllm_config(model, **TIER)
    with pytest.raises(ConfigError, match="OffloadingConnector"):
        MultiConnector(config, base.KVConnectorRole.SCHEDULER, w.cache_config([attention()]))


@pytest.mark.parametrize("window,tier_blocks", [(SIZE, 0), (4 * SIZE, 3)])
def test_windows_end_with_the_last_range(world, window, tier_blocks):
    specs = [attention(), attention(SlidingWindowSpec, sliding_window=window)]
    engine = world(**TIER, specs=specs)
    blocks = [*range(1, 8)]
    request, _, step = _loading(engine, stored=161, remote_block_ids=[blocks, blocks])
    assert [load.token_ranges for load in step.news.loads] == [((160, 199), (160, 199))]
    (job,) = step.tier
    assert list(job.dst_spec.group_sizes) == [160 // SIZE, tier_blocks]
    full, seen = engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    assert job.dst_spec.block_ids.tolist() == full[:5] + seen[5 - tier_blocks : 5]


def test_a_state_is_loaded_with_the_last_range(world, fake, monkeypatch):
    fake(SPLIT)
    loaded = "get_loaded_kv_cache_group_ids"  # which vLLM 0.31 does not ask for
    monkeypatch.setattr(w.KeepingConnector, loaded, lambda *_: (0,), raising=False)
    specs = [attention(), w.state_spec()]
    engine = world(**FAKE, specs=specs, engine={"enable_prefix_caching": False})
    offer = w.offer(100, remote_block_ids=[[1, 2, 3, 4], [5]], remote_first_blocks=[0, 98])
    request = engine.add(100, offer)
    (load,) = engine.step()[0].loads
    assert load.token_ranges == ((SPLIT, 99), (98, 99))
    # vLLM treats the others as not loaded
    assert engine.connector.get_loaded_kv_cache_group_ids(request) == (0,)


@pytest.mark.parametrize("loads,is_async", [(40, True), (SPLIT, False)])
def test_a_prefix_after_which_no_range_can_begin_is_loaded_alone(world, fake, loads, is_async):
    """The prefix ends inside a block, or is loaded in the step that computes with it."""
    fake(loads, is_async=is_async)
    engine = world(**FAKE)
    request = engine.add(100, w.offer(100))
    news, _ = engine.step()
    assert (news.loads, news.dropped) == ([], [request.request_id])
    if is_async:
        engine.step(finished_recving={request.request_id})
        engine.step()
    assert request.num_output_tokens == 1


def test_a_synchronous_load_does_not_follow_an_asynchronous_one(world, fake):
    fake(SPLIT + 1, is_async=False)
    engine = world(**FAKE, is_first=True)
    request = engine.add(SPLIT + 1, w.offer(SPLIT + 1))
    (load,) = engine.step()[0].loads
    assert (load.token_ranges, request.num_computed_tokens) == (((0, SPLIT),), SPLIT)


@pytest.mark.skipif(
    vllm.__version__.startswith("0.31"), reason="vLLM 0.31 counts hits without their sources"
)
def test_tokens_of_several_sources_are_counted_once(world, fake):
    fake(SPLIT)
    engine = world(**FAKE)
    request = engine.add(100, w.offer(100))
    engine.step()
    # vLLM may take fewer tokens than it was offered
    for tokens, sources in (
        (99, {"external_unspecified": SPLIT, "p2p": 99 - SPLIT}),
        (48, {"external_unspecified": 48}),
    ):
        found = engine.connector.get_external_cache_hit_sources(request, tokens)
        assert {source.value: number for source, number in found.items()} == sources


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("lost", ["ours", "the tier's"])
def test_a_range_that_is_lost_fails_the_request_once(world, policy, lost):
    """Where vLLM recomputes, the engine keeps the tier's range or loads it again."""
    engine = world(**TIER, policy=policy)
    request, ended, _ = _loading(engine)
    name = request.request_id
    (ids,) = engine.scheduler.kv_cache_manager.get_block_ids(name)
    steps = []
    if lost == "ours":  # its blocks are known while the tier still loads
        report = WorkerReport(failed={name: "PeerLostError: gone"})
        steps.append(w.TierStep(engine, report, invalid_block_ids=set(ids[SPLIT // SIZE :])))
    failed = set() if lost == "ours" else {name}
    steps.append(w.TierStep(engine, failed_recving=failed, **ended))
    outputs = [output for step in steps for output in step.outputs]
    reasons = [str(output.finish_reason) for output in outputs if output.finished]
    assert reasons == ["error"] * (policy == "fail")
    if policy == "fail":
        assert (engine.used_blocks, engine.scheduler.requests) == (0, {})
        return
    step = w.TierStep(engine)
    if lost != "ours":
        assert (step.news.loads, len(step.tier)) == ([], 1)
        w.TierStep(engine, **ended)
        step = w.TierStep(engine)
    assert step.computed == {name: 200 - SPLIT}


def test_an_aborted_request_keeps_its_blocks_until_both_have_ended(world):
    engine = world(**TIER)
    request, ended, _ = _loading(engine)
    engine.abort(request.request_id)
    assert w.TierStep(engine).news.dropped == [request.request_id]
    assert engine.used_blocks > 0
    w.TierStep(engine, failed_recving={request.request_id}, **ended)
    assert (engine.used_blocks, engine.scheduler.requests) == (0, {})
    assert engine.connector._shares == {}


@pytest.mark.parametrize("is_ranged,stored", [(True, SPLIT), (False, 0)])
def test_a_preempted_request_comes_back_from_the_tier_alone(world, monkeypatch, is_ranged, stored):
    """The tier stores blocks as they fill, so it has the producer's tokens as well."""
    engine = world(beside="OffloadingConnector", is_ranged=is_ranged)
    request, ended, step = _loading(engine, stored or 1)
    assert [load.token_ranges for load in step.news.loads] == [((stored, 199),)]
    w.TierStep(engine, **ended)
    while request.num_output_tokens < 2:
        w.TierStep(engine)
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    with monkeypatch.context() as patch:  # vLLM's connector does not accept both in one step
        patch.setattr(engine.connector, "get_num_new_matched_tokens", lambda *_: (None, False))
        w.TierStep(engine)
    step = w.TierStep(engine)
    (job,) = step.tier
    assert (step.news.loads, len(job.dst_spec.block_ids)) == ([], 200 // SIZE)
    w.TierStep(engine, **ended)
    while request.num_output_tokens < 4:
        w.TierStep(engine)


@pytest.mark.parametrize("is_first", [False, True])
def test_vllms_own_connector_loads_from_the_first_hit_alone(world, fake, is_first):
    """The first child has a prefix, and the engine computes the rest, or the producer has the whole prompt."""
    fake(SPLIT)
    engine = world(beside="KeepingConnector", is_first=is_first)
    request = engine.add(200, w.offer(200))
    news, _ = engine.step()
    assert [load.token_ranges for load in news.loads] == [((0, 199),)] * is_first
    assert news.dropped == ([] if is_first else [request.request_id])
    engine.step(finished_recving={request.request_id})
    assert [output.new_token_ids for output in engine.step()[1]] == [[7]]


@pytest.mark.parametrize("seed", range(20))
def test_a_worker_reports_each_request_when_its_last_child_has_ended(model, seed):
    rng = random.Random(seed)
    number = rng.randint(1, 3)
    worker = _worker(model, number)
    plan = {}  # by request and child, the step in which it ends, and whether it fails
    for request in map(str, range(12)):
        children = rng.sample(range(number), rng.randint(1, number))
        plan[request] = {each: (rng.randint(0, 4), rng.random() < 0.3) for each in children}
    extra = {request: len(ends) - 1 for request, ends in plan.items() if len(ends) > 1}
    reports, failed = [], set()
    for step in range(5):
        of_children = tuple(base.KVConnectorMetadata() for _ in range(number))
        saves, loads = (dict(extra), extra) if step == 0 else (None, {})
        worker.bind_connector_metadata(ranges.RangeMetadata(of_children, saves, loads))
        for position, child in enumerate(worker.sub_connectors):
            ended = {r for r, ends in plan.items() if ends.get(position, (-1,))[0] == step}
            lost = {r for r in ended if plan[r][position][1]}
            child.results = base.KVConnectorTransferResults(set(ended), set(ended), lost)
        results = worker.get_transfer_results(set())
        assert results.finished_sending == results.finished_recving
        assert results.failed_recving <= results.finished_recving
        reports += [(request, step) for request in results.finished_recving]
        failed |= results.failed_recving
    last = {request: max(step for step, _ in ends.values()) for request, ends in plan.items()}
    assert sorted(reports) == sorted(last.items())
    assert failed == {r for r, ends in plan.items() if any(lost for _, lost in ends.values())}


def _worker(model, num_children):
    """Return a worker's connector whose children report what the test sets."""
    config = w.vllm_config(model, **FAKE)
    options = config.kv_transfer_config.kv_connector_extra_config
    options["connectors"] = [options["connectors"][0]] * num_children
    caches = w.cache_config([attention()])
    return MultiConnector(config, base.KVConnectorRole.WORKER, caches)


@pytest.mark.parametrize("is_ranged", [False, True])
def test_a_child_that_takes_our_requests_for_its_own_is_refused(model, monkeypatch, is_ranged):
    """MooncakeConnector claims each prompt that is to be loaded, and never loads what it does not know how to find."""
    monkeypatch.setattr(Placement, "here", classmethod(lambda *_: placed()))
    config = w.vllm_config(model, beside="KeepingConnector", is_ranged=is_ranged)
    kind = MultiConnector if is_ranged else multi_connector.MultiConnector
    made = kind(config, base.KVConnectorRole.WORKER, w.cache_config([attention()]))
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", made)
    with pytest.raises(LocalError, match="at least one cache"):
        made.register_kv_caches({})
    for name in [*RIVALS, "KVConnector"]:
        made.sub_connectors[0].__class__ = type(name, (w.KeepingConnector,), {})
        with pytest.raises(ConfigError, match=f"only one child.*{name}"):
            made.register_kv_caches({})


@pytest.mark.parametrize(
    "name", ["MooncakeConnector", "MoRIIOConnector", "NixlConnector", "NixlPushConnector"]
)
def test_children_are_refused_by_names_that_vllm_has(name):
    try:
        kind = KVConnectorFactory.get_connector_class_by_name(name)
    except ImportError as error:
        pytest.skip(str(error))
    assert RIVALS.intersection(each.__name__ for each in kind.__mro__)


def test_another_load_policy_is_refused_and_a_useless_order_warned_of(model, caplog):
    config = w.vllm_config(model, **FAKE, is_first=True)
    arguments = config, base.KVConnectorRole.SCHEDULER, w.cache_config([attention()])
    MultiConnector(*arguments)
    assert "after it load no part" in caplog.text
    config.kv_transfer_config.kv_connector_extra_config["load_policy"] = "first"
    with pytest.raises(ConfigError, match="load_policy"):
        MultiConnector(*arguments)


def test_children_agree_on_a_cache_layout(model):
    config = w.vllm_config(model, **TIER)
    assert MultiConnector.get_required_kvcache_layout(config) == "LBHNC"
