"""Set-up of every test: thread pools, hypothesis profiles, skips for missing hardware, checks for leftover threads."""

import functools
import importlib.util
import multiprocessing
import os
import threading
import time
from pathlib import Path

# Set here, because the libraries read them when they are first imported.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
HAS_GPU_DEVICE = any(Path("/dev").glob("nvidia[0-9]*"))
if not HAS_GPU_DEVICE:
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest  # noqa: E402  the environment above comes first
from hypothesis import HealthCheck, Phase, settings  # noqa: E402

from native import build  # noqa: E402

LEFTOVER_GRACE_S = 10.0

# As scripts/setup.sh does, for a checkout that is on the import path without being installed.
build.build_in_checkout()

# The conformance suites use assert like tests, and should explain failures like tests.
pytest.register_assert_rewrite("tests.support")

# No deadlines and no speed health check: an example's time depends more on the machine's load than on the code.
_untimed = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True, database=None
)
# Properties that need another number of examples use tests/support/examples.py, which scales it by these profiles.
settings.register_profile("ci", _untimed, max_examples=50, derandomize=True)
settings.register_profile("explore", _untimed, max_examples=50)
settings.register_profile("thorough", _untimed, max_examples=1000)
# scripts/mutants needs no shrinking
settings.register_profile(
    "mutants", _untimed, max_examples=50, derandomize=True, phases=(Phase.explicit, Phase.generate)
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@functools.cache
def gpu_count():
    """Return the number of CUDA devices that torch can use, without importing torch on a host that has none."""
    if not HAS_GPU_DEVICE or importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count()


def _has_ucx():
    """Return True if a UCX could be loaded."""
    from tests.support.libraries import has_ucx

    return has_ucx()


def _missing_for(item):
    """Return the reason why this machine cannot run a test, by its markers, or None."""
    if item.get_closest_marker("gpu") and gpu_count() < 1:
        return "needs a GPU"
    if item.get_closest_marker("multi_gpu") and gpu_count() < 2:
        return "needs two GPUs"
    if item.get_closest_marker("vllm") and importlib.util.find_spec("vllm") is None:
        return "needs vLLM"
    if item.get_closest_marker("ucx") and not _has_ucx():
        return "needs a UCX"
    return None


def pytest_runtest_setup(item):
    if reason := _missing_for(item):
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def nothing_left_running():
    """Fail a test that leaves a thread or a child process that would keep the interpreter alive."""
    before = _running()
    yield
    deadline = time.monotonic() + LEFTOVER_GRACE_S
    while (leftover := _running() - before) and time.monotonic() < deadline:
        time.sleep(0.01)
    if leftover:
        pytest.fail(f"still running after the test: {sorted(map(str, leftover))}")


def _running():
    threads = {thread for thread in threading.enumerate() if not thread.daemon}
    return threads | {child for child in multiprocessing.active_children() if not child.daemon}
