"""SGLang's Python sources without their dependencies: pools, the queues' signatures and a backend's base classes.

SGLang imports 200 packages, of which those classes use only torch. Stand-ins replace the others, its compiled kernels
among them: any of their names can be imported, subclassed and called, and is a class without behaviour.
"""

import importlib.machinery
import importlib.util
import os
import re
import sys
from functools import partial
from pathlib import Path

VARIABLE = "SGLANG_SOURCES"
PACKAGE = "sglang"
REAL = {
    PACKAGE,
    "kvconnector",
    "torch",
    "numba",
    "triton",
    "dill",
    "regex",
    *sys.stdlib_module_names,
}
"""Packages without a stand-in: SGLang uses them, or does without those that are missing."""
OTHERWISE_VERSIONED = {"accelerate", "huggingface_hub", "pydantic", "torchvision", "transformers"}
"""Packages with a stand-in even if they are installed, since their version may not be the one that SGLang needs."""


def use_sources():
    """Make `sglang` importable from the folder that the environment names, if it names one.

    The package's own module is left out, because it imports clients of other services.
    """
    folder = os.environ.get(VARIABLE)
    if not folder:
        return
    sys.path.append(folder)
    sys.meta_path.insert(0, Finder(OTHERWISE_VERSIONED))
    sys.meta_path.append(Finder())
    sys.modules.setdefault(
        "regex", re
    )  # names from another regular expression library, used at import
    spec = importlib.machinery.ModuleSpec(PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(Path(folder, PACKAGE))]
    sys.modules[PACKAGE] = importlib.util.module_from_spec(spec)


class Finder:
    """Finds every package that SGLang itself imports, or those of `only`."""

    def __init__(self, only=None):
        self._only = only

    def find_spec(self, name, path=None, target=None):
        package = name.partition(".")[0]
        is_left = package in REAL if self._only is None else package not in self._only
        if is_left or not _importer().startswith(PACKAGE):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        module.__version__ = "0"
        module.__getattr__ = partial(_attribute, module.__name__)


def _importer():
    frame = sys._getframe(2)
    while frame and frame.f_globals["__name__"].startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals["__name__"] if frame else ""


def _attribute(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    return StandIn(f"{owner}.{name}", (Nothing,), {"is_stand_in": True})


class StandIn(type):
    """A class whose attributes, items and instances are stand-ins. A function that it decorates is unchanged."""

    def __new__(mcs, name, bases, namespace, **_):
        return super().__new__(mcs, name, bases, namespace)

    def __init__(cls, name, bases, namespace, **_):
        super().__init__(name, bases, namespace)

    def __getattr__(cls, name):
        return _attribute(cls.__name__, name)

    def __call__(cls, *arguments, **options):
        if not cls.__dict__.get("is_stand_in"):
            return super().__call__(*arguments, **options)
        is_decorated = len(arguments) == 1 and not options and callable(arguments[0])
        return arguments[0] if is_decorated else _attribute(cls.__name__, "result")

    def __or__(cls, other):
        return cls

    __ror__ = __getitem__ = __or__

    def __setitem__(cls, key, value):
        pass

    def __iter__(cls):
        return iter(())


class Nothing(metaclass=StandIn):
    def __init_subclass__(cls, **_):
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, *_):
        from pydantic_core import core_schema

        return core_schema.any_schema()
