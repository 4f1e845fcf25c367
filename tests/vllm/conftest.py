import importlib.util

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from tests.vllm.harness.model import make_model

    return str(make_model(tmp_path_factory.mktemp("models")))


@pytest.fixture
def world(model):
    """Makes engines with one connector role; by default a decode engine with one full-attention group."""
    from kvconnector.integrations.vllm.caches import group_info
    from tests.vllm import scheduler_world as w

    worlds = []

    def make(role="kv_consumer", *, specs=None, is_async=False, **options):
        specs = specs or [w.attention_spec()]
        infos = tuple(group_info(spec, n, 1) for n, spec in enumerate(specs))
        config = w.vllm_config(model, role, **options)
        shakes = {(0, 0): w.handshake(infos)}
        worlds.append(w.World(config, w.cache_config(specs), shakes, is_async=is_async))
        return worlds[-1]

    yield make
    for one in worlds:
        one.close()
