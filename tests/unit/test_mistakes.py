"""Common mistakes of engine authors: the call refuses each with a clear error and changes nothing."""

import numpy as np
import pytest
import torch
from msgspec import structs

import kvconnector as kvc
from kvconnector.errors import (
    BlockIdError,
    ConfigError,
    GeometryError,
    LocalError,
    RemoteProtocolError,
    UnknownRequestError,
)
from tests.support.fakes import FakeEngine, attention_model
from tests.unit.runtime.test_scheduler import PARAMS


def config():
    settings = {"engine_id": "e", "role": "both", "control": {"insecure": True}}
    return kvc.Config.from_mapping(settings)


def cache(*shape):
    return torch.zeros(shape or (4, 2, 8, 4))


def worker(**changes):
    return kvc.Worker(**{"config": config(), "rank": (0, 0), "model": "m", **changes})


@pytest.fixture(scope="module")
def engine():
    with worker() as registered:
        registered.register({0: (cache(), cache())})
        with kvc.Scheduler(config(), [registered.handshake()]) as scheduler:
            params = scheduler.offer("held", blocks=[[0, 1]], num_tokens=10)
            scheduler.on_new_request("wanted", {**params, "remote_engine_id": "p"})
            scheduler.matched_tokens("wanted", 11, 0)
            yield registered, scheduler


CONSTRUCTION = [
    (lambda: kvc.Config.from_mapping(None), ConfigError, "settings must be a mapping"),
    (lambda: worker(config={"engine_id": "e"}), ConfigError, "Config.from_mapping"),
    *(
        (
            lambda rank=rank: worker(rank=rank),
            ConfigError,
            f"(pp_rank, tp_rank), such as (0, 0) [rank={rank!r}]",
        )
        for rank in (0, (0,), (0, "1"), (-1, 0), None)
    ),
    (lambda: worker(model=None), ConfigError, "model must be a name"),
    (lambda: worker().handshake(), LocalError, "call register before"),
    (lambda: kvc.Scheduler(config(), []), GeometryError, "at least one worker"),
    (lambda: kvc.Scheduler({}, []), ConfigError, "got='dict'"),
    (lambda: kvc.Scheduler(config(), [worker()]), ConfigError, "handshake()"),
    (lambda: kvc.view_of(np.zeros((1, 1, 1, 1))), GeometryError, "torch.from_numpy"),
    (
        lambda: kvc.cache_group({0: (cache(),), 2: (cache(),)}, scales={0: [[1.0]]}),
        GeometryError,
        "for each layer [layers=(0, 2), scaled=[0]]",
    ),
]
CACHES = [
    (cache(), "{0: (k, v)}"),
    ([cache()], "{0: (k, v)}"),
    ([], "{0: (k, v)}"),
    ({0: cache()}, "tuple of tensors"),
    ({0: (np.zeros((4, 2, 8, 4)),)}, "torch.from_numpy"),
    ({}, "at least one layer"),
    ({0: ()}, "each tensor of a layer is a part"),
    ({0: (cache(),) * 3}, "part_names"),
    ({0: (cache(4, 2, 8),)}, "four axes"),
    ({0: (cache(),), 1: (cache(4, 2, 16, 4),)}, "of all layers must be alike"),
    ({"model.layers.0": (cache(),)}, "layers must be numbered"),
    ({0: (cache(1, 2, 8, 4).expand(4, 2, 8, 4),)}, "overlap"),
]
ORDERS = [
    (lambda w, s: w.start_step(None), LocalError, "Scheduler.build_step"),
    (lambda w, s: s.update([]), LocalError, "aggregator"),
    (lambda w, s: s.on_new_request("q", "{}"), RemoteProtocolError, "must be a mapping"),
    (lambda w, s: s.on_new_request("q", {"do_remote_prefill": True}), RemoteProtocolError, "field"),
    (lambda w, s: s.load("unknown", blocks=[[1]], num_tokens=4), UnknownRequestError, "unknown"),
    (lambda w, s: s.load("wanted", blocks=[1], num_tokens=10), BlockIdError, "a list of block ids"),
    (
        lambda w, s: s.offer(None, blocks=[[1]], num_tokens=4),
        LocalError,
        "a request's id must be a string",
    ),
]


WRONG_PARAMS = [
    ({"transfer_secret": "short"}, RemoteProtocolError),
    ({"transfer_secret": "\u00e9" * 32}, RemoteProtocolError),
    ({"remote_request_id": ""}, RemoteProtocolError),
    ({"remote_engine_id": "x" * 600}, RemoteProtocolError),
    ({"remote_block_ids": [[-1]]}, RemoteProtocolError),
    ({"remote_block_ids": "text"}, RemoteProtocolError),
    ({"remote_block_ids": []}, RemoteProtocolError),
    ({"remote_host": None}, RemoteProtocolError),
    ({"remote_first_blocks": [0, 0]}, RemoteProtocolError),
]


@pytest.mark.parametrize("call, kind, words", CONSTRUCTION)
def test_wrong_constructor_arguments_are_refused(call, kind, words):
    with pytest.raises(kind) as raised:
        call()
    assert words in str(raised.value)


@pytest.mark.ucx
@pytest.mark.parametrize("caches, words", CACHES)
def test_wrong_caches_are_refused(caches, words):
    with worker() as refused:
        with pytest.raises(GeometryError) as raised:
            refused.register(caches)
        assert words in str(raised.value)
        with pytest.raises(GeometryError, match="total_heads must be an integer"):
            refused.register({0: (cache(),)}, total_heads="8")
        assert "not registered" in repr(refused)


@pytest.mark.ucx
@pytest.mark.parametrize("call, kind, words", ORDERS)
def test_wrong_orders_are_refused(engine, call, kind, words):
    with pytest.raises(kind) as raised:
        call(*engine)
    assert words in str(raised.value)


@pytest.mark.ucx
@pytest.mark.parametrize("wrong", ["no geometry", "another engine", "other caches"])
def test_a_worker_begins_with_the_geometry_of_its_own_engine(wrong):
    other = FakeEngine("e", attention_model()).geometry()
    with worker() as registered:
        registered.register({0: (cache(), cache())})
        with kvc.Scheduler(config(), [registered.handshake()]) as scheduler:
            scheduler.offer("r", blocks=[[0]], num_tokens=8)
            step = scheduler.build_step()
        changed = {
            "no geometry": None,
            "another engine": structs.replace(step.engine, engine_id="f"),
            "other caches": other,
        }
        words = "must carry" if wrong == "no geometry" else "does not match this worker's"
        with pytest.raises(LocalError, match=words):
            registered.start_step(structs.replace(step, engine=changed[wrong]))
        registered.start_step(step)


@pytest.mark.ucx
@pytest.mark.parametrize("changes, kind", WRONG_PARAMS)
def test_wrong_transfer_params_are_refused(engine, changes, kind):
    _, scheduler = engine
    with pytest.raises(kind):
        scheduler.on_new_request("new", {**PARAMS, **changes})
    scheduler.on_new_request("new", PARAMS)
    scheduler.abort("new")
