"""The process that tests fork from has nothing that a forked process could not use."""

from tests.support.forked import run_python

REPORT = """
import os, sys
from pathlib import Path
import tests.support.preloaded
mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
devices = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
torch = sys.modules["torch"]
print("threads", len(os.listdir("/proc/self/task")))
print("ucx", sorted(each for each in mapped if "/libucp" in each or "/libuct" in each))
print("devices", sorted(each for each in devices if each.startswith(("/dev/nvidia", "/dev/infiniband"))))
print("cuda", torch.cuda.is_initialized())
"""


def test_the_process_that_tests_fork_from_has_no_thread_no_ucx_and_no_device():
    found = run_python("-c", REPORT).splitlines()
    assert found == ["threads 1", "ucx []", "devices []", "cuda False"]
