"""Every public function of the cache, the layouts, the topology, the aggregator and the receive transforms has a user:
the demo's engines or `kvconnector plan` call it.
"""

import sys

import pytest
import torch

from tests.support.forked import Process
from tests.unit.minillm.seed_cases import public_functions

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(350)]

DEADLINE_S = 300.0
# functions that engines on the CPU replace by others
ON_A_GPU = {"cache.block_table.BlockTable.device_tensor"}


def test_every_public_function_is_called_by_a_case(tmp_path):
    """The cases run in a process of their own, where no results are cached."""
    command = [sys.executable, "-m", "tests.unit.minillm.seed_cases", str(tmp_path)]
    with (tmp_path / "log").open("w") as log:
        process = Process(command, stdout=log, stderr=log)
    try:
        status = process.wait(DEADLINE_S)
    finally:
        process.kill()
    assert status == 0, (tmp_path / "log").read_text()
    called = set((tmp_path / "called").read_text().split())
    unreachable = set() if torch.cuda.is_available() else ON_A_GPU
    assert set(public_functions()) - called <= unreachable
