import pytest

import kvconnector as kvc
from tests.support.forked import run_python


def test_every_public_name_exists_and_is_documented():
    for name in kvc.__all__:
        assert name in dir(kvc)
        value = getattr(kvc, name)
        assert name == "__version__" or value.__doc__
        assert name == "__version__" or f"`{name}`" in kvc.__doc__
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = kvc.Engine


@pytest.mark.parametrize(
    "module, heavy",
    [
        (
            "kvconnector",
            {"kvconnector._version", "torch", "numpy", "msgspec", "zmq", "ucxx", "typing", "re"},
        ),
        ("kvconnector.planning", {"kvconnector.planning.naive"}),
        # vLLM on a CPU inspects all modules when a worker starts, and fails on llvmlite's
        ("kvconnector.datapath", {"numba", "llvmlite", "torch"}),
    ],
)
def test_imports_stay_light(module, heavy):
    code = (
        f"import sys; before = set(sys.modules); import {module};"
        f" sys.exit({heavy} & set(sys.modules) - before or None)"
    )
    run_python("-W", "error", "-c", code)
