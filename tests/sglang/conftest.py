import importlib.util

from tests.sglang.sources import use_sources

if importlib.util.find_spec("sglang") is None:
    use_sources()
if importlib.util.find_spec("sglang") is None:
    collect_ignore_glob = ["test_*.py"]
