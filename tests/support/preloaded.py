"""What the process has imported and compiled that `tests.support.forked` forks from.

Nothing of this may start a thread or open a device when it is imported.
"""

import importlib
import importlib.util

from kvconnector_kernels.pump import copy_cpu

for module in (
    "kvconnector.bench.rank_process",
    "kvconnector.datapath.pump.opening",
    "minillm.router",
    "minillm.server",
    "minillm.worker",
    "tests.support.fakes",
    "tests.support.transport_suite",
):
    importlib.import_module(module)
if importlib.util.find_spec("ucxx") is not None:
    importlib.import_module("ucxx")
copy_cpu.compile_copy()
