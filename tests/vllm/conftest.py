import importlib.util
import logging
from contextlib import ExitStack, closing

import pytest

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def log_reaches_the_test(monkeypatch):
    """A connector shares vLLM's handlers and then propagates nothing, which would hide the log of the first test that
    makes one from `caplog`. A handler of ours keeps it from that, as an operator's would.
    """
    ours = logging.getLogger("kvconnector")
    monkeypatch.setattr(ours, "handlers", [logging.NullHandler()])
    monkeypatch.setattr(ours, "propagate", True)
    before = ours.level
    ours.setLevel(logging.INFO)
    yield ours
    ours.setLevel(before)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from tests.vllm.harness.model import make_model

    return str(make_model(tmp_path_factory.mktemp("models")))


@pytest.fixture
def world(model):
    """Makes engines with one connector role; by default a decode engine with one full-attention group."""
    from kvconnector.integrations.vllm.caches import group_info
    from tests.vllm import scheduler_world as w
    from tests.vllm.cache_world import attention

    stack = ExitStack()

    def make(role="kv_consumer", *, specs=None, is_async=False, **options):
        specs = specs or [attention()]
        infos = tuple(group_info(spec, n, 1) for n, spec in enumerate(specs))
        config = w.vllm_config(model, role, **options)
        # an engine that also offers its blocks both reads and is read
        of_workers = "kv_both" if options.get("bidirectional_kv_xfer") else role
        shakes = {(0, 0): w.handshake(infos, role=of_workers)}
        made = w.World(config, w.cache_config(specs), shakes, is_async=is_async)
        return stack.enter_context(closing(made))

    with stack:
        yield make
