"""How SGLang finds the backend: its plugin group calls `register` in every process, whatever backend is chosen.

SGLang's list of backends is an Enum, and its lookup a chain of comparisons: the Enum is replaced by one with a member
more, and the lookup asked only for its own. Before the backend is chosen nothing else is touched or imported.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from importlib.metadata import version
from typing import Any

from kvconnector.errors import ConfigError

NAME = "kvconnector"
KNOWN_VERSIONS = ("0.5.23",)
UTILS = "sglang.srt.disaggregation.utils"


def register() -> None:
    """Make the backend known to SGLang.

    Raises:
        ConfigError: this version of SGLang takes no backends in the way that is known here.
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
    """The class that SGLang asks for; in a version that is not known the answer is an error."""
    if backend.value != NAME:
        return original(backend, class_type)
    if version("sglang") not in KNOWN_VERSIONS:
        raise _unknown_version()
    from kvconnector.integrations.sglang.backend import CLASSES

    return CLASSES.get(class_type.value)


def _unknown_version() -> ConfigError:
    return ConfigError(
        "kvconnector's backend is written for other versions of SGLang: use one of these, or a kvconnector for yours",
        sglang=version("sglang"),
        known=KNOWN_VERSIONS,
    )
