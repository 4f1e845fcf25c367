import subprocess
import sys


def test_nothing_is_compiled_where_only_names_are_imported():
    """vLLM on a CPU looks through all modules when a worker starts, and fails on llvmlite's."""
    found = "import sys, kvconnector.runtime; print({'numba', 'llvmlite'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", found], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "set()"
