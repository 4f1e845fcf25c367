import subprocess
import sys

import pytest

import kvconnector as kvc


def _python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
    )


def test_every_name_of_the_face_is_there_and_documented():
    for name in kvc.__all__:
        assert name in dir(kvc)
        value = getattr(kvc, name)
        assert name == "__version__" or value.__doc__
        assert name == "__version__" or f"`{name}`" in kvc.__doc__
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        _ = kvc.Engine


def test_importing_the_package_imports_nothing_heavy():
    code = (
        "import sys, kvconnector; heavy = {'torch', 'numpy', 'numba', 'msgspec', 'zmq', 'ucxx'};"
        "sys.exit(heavy & set(sys.modules) or None)"
    )
    done = _python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
