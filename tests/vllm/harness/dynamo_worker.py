"""`python -m dynamo.vllm` without torchvision, which PyPI has for CUDA only: the code that imports it is for images."""

import runpy
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

# looks for torchvision once, and caches the result
from transformers.utils import is_torchvision_available

NAMES = ("torchvision", "transforms", "v2", "functional")


def main():
    if not is_torchvision_available():
        for depth in range(1, len(NAMES) + 1):
            name = ".".join(NAMES[:depth])
            sys.modules[name] = module = ModuleType(name)
            module.__spec__, module.__path__ = ModuleSpec(name, None), []
            if depth > 1:
                setattr(sys.modules[name.rpartition(".")[0]], NAMES[depth - 1], module)
    runpy.run_module("dynamo.vllm", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
