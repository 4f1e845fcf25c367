from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = [
        "test_*.py",
        "scheduler_world.py",
        "keeping_connector.py",
        "slot_kernels.py",
    ]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from tests.vllm.harness.model import make_model

    return str(make_model(tmp_path_factory.mktemp("models")))


@pytest.fixture
def cpu_kernels():
    """vLLM's compiled operations for the CPU."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "cpu_attn_reshape_and_cache"):
        pytest.skip("this vLLM is its Python sources alone, without the CPU's kernels")


@pytest.fixture
def world(model):
    """Makes engines with one connector role; by default a decode engine with one full-attention group."""
    from kvconnector.integrations.vllm.messages import GroupInfo
    from tests.vllm.scheduler_world import (
        World,
        attention_spec,
        cache_config,
        handshake,
        vllm_config,
    )

    worlds = []

    def make(
        role="kv_consumer",
        policy="recompute",
        *,
        specs=None,
        infos=None,
        beside="",
        is_async=False,
        engine=None,
        **extra,
    ):
        config = vllm_config(model, role, policy, beside=beside, engine=engine, **extra)
        infos = infos or (GroupInfo(vllm_group=0, kernel_blocks=1),)
        caches = cache_config(specs or [attention_spec()])
        worlds.append(World(config, caches, {(0, 0): handshake(infos)}, is_async=is_async))
        return worlds[-1]

    yield make
    for one in worlds:
        one.close()
