"""The imports and compilations of the process that `tests.support.forked` forks from.

No import here may start a thread or open a device.
"""

import importlib

from kvconnector_kernels.pump import copy_cpu
from tests.support.libraries import has_ucx

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
has_ucx()
copy_cpu.compile_copy()
