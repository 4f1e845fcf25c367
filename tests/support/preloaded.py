"""The imports of the process that `tests.support.forked` forks from.

None may start a thread, load UCX, whose modules open devices, or initialise CUDA: a forked process could use neither.
"""

import importlib

for module in (
    "kvconnector.bench.engine_process",
    "kvconnector.datapath.pump.opening",
    "minillm.router",
    "minillm.server",
    "minillm.worker",
    "tests.support.fakes",
    "tests.support.transport_suite",
):
    importlib.import_module(module)
