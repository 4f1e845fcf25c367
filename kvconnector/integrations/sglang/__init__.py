"""The entry point of the SGLang backend. SGLang's plugin loader calls `register` in every process.

SGLang lists its transfer backends in an Enum and finds their classes with a chain of comparisons. `register` replaces
the Enum by one that has our backend too, and wraps the lookup. It imports and changes nothing else, because it also
runs where another backend is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from importlib.metadata import version
from typing import Any

from kvconnector.errors import ConfigError

NAME = "kvconnector"
KNOWN_VERSIONS = ("0.5.21", "0.5.22", "0.5.23")
UTILS = "sglang.srt.disaggregation.utils"


def register() -> None:
    """Add `kvconnector` to SGLang's transfer backends.

    Raises:
        ConfigError: This version of SGLang lacks the hooks for that.
    """
    try:
        from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
        from sglang.srt.disaggregation.utils import TransferBackend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    except ImportError as error:
        raise _unknown_version() from error
    members = {member.name: member.value for member in TransferBackend} | {NAME.upper(): NAME}
    extended = Enum("TransferBackend", members, module=UTILS)  # type: ignore[misc] # members at run time
    add_disagg_transfer_backend_choices([NAME])
    HookRegistry.register(f"{UTILS}.TransferBackend", extended, HookType.REPLACE)
    HookRegistry.register(f"{UTILS}.get_kv_class", _class_of, HookType.AROUND)


def _class_of(original: Callable[[Any, Any], Any], backend: Any, class_type: Any) -> Any:
    """Return the class that SGLang requests. Raises ConfigError: `KNOWN_VERSIONS` lacks this version of SGLang."""
    if backend.value != NAME:
        return original(backend, class_type)
    if version("sglang") not in KNOWN_VERSIONS:
        raise _unknown_version()
    from kvconnector.integrations.sglang.backend import CLASSES

    return CLASSES.get(class_type.value)


def _unknown_version() -> ConfigError:
    return ConfigError(
        "kvconnector does not support this version of SGLang: use a known one, or a kvconnector release for yours",
        sglang=version("sglang"),
        known=KNOWN_VERSIONS,
    )
