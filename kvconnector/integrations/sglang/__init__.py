"""The entry point of the SGLang backend. SGLang's plugin loader calls `register` in every process.

SGLang lists its transfer backends in an Enum and finds their classes with a chain of comparisons. `register` replaces
the Enum by one that has our backend too, and wraps the lookup. It imports and changes nothing else, because it also
runs where another backend is chosen.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from enum import Enum
from functools import cache
from importlib.metadata import version
from typing import Any

from kvconnector.integrations.contract import Sources, admit, differences, policy_of
from kvconnector.integrations.sglang import used

logger = logging.getLogger(__name__)

NAME = "kvconnector"
KNOWN_VERSIONS = ("0.5.21", "0.5.22", "0.5.23")
UTILS = "sglang.srt.disaggregation.utils"


def register() -> None:
    """Add `kvconnector` to SGLang's transfer backends. It never raises: SGLang would only log that, and then say that
    there is no such backend. What keeps it from working is said when the backend is chosen.
    """
    try:
        add_choice()
        install()
    except Exception as error:
        logger.error(
            "SGLang %s has no transfer backend kvconnector, which needs one of %s: %r",
            version("sglang"),
            ", ".join(KNOWN_VERSIONS),
            error,
        )


def add_choice() -> None:
    """Let SGLang's command line accept the backend's name. Idempotent."""
    from sglang.srt.arg_groups import choices

    if NAME not in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        choices.add_disagg_transfer_backend_choices([NAME])


def platform() -> None:
    """Let SGLang's command line accept the backend's name in launchers that load no plugins before they read it, such
    as Dynamo's. An entry point of `sglang.srt.platforms`, which SGLang calls when it looks for the machine's platform,
    as importing its arguments does. That is a side effect where one is not expected: we are no platform.
    """
    try:
        add_choice()
    except Exception as error:
        logger.error("SGLang's command line does not accept kvconnector: %r", error)


def install() -> None:
    """Let SGLang find our classes by the backend's name: all that depends on how SGLang selects a backend."""
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    members = {member.name: member.value for member in TransferBackend} | {NAME.upper(): NAME}
    make_enum: Callable[..., Any] = Enum  # type checkers want members that they can read
    extended = make_enum("TransferBackend", members, module=UTILS)
    HookRegistry.register(f"{UTILS}.TransferBackend", extended, HookType.REPLACE)
    HookRegistry.register(f"{UTILS}.get_kv_class", _class_of, HookType.AROUND)


def _class_of(original: Callable[[Any, Any], Any], backend: Any, class_type: Any) -> Any:
    """Return the class that SGLang requests. Raises ConfigError: this version of SGLang is not supported."""
    if backend.value != NAME:
        return original(backend, class_type)
    check_release()
    from kvconnector.integrations.sglang.backend import CLASSES

    return CLASSES.get(class_type.value)


@cache
def check_release(part: str = "ENTRIES") -> None:
    """Raise ConfigError unless this is a known release of SGLang, or one that has all that `part` of `used.py` names.
    Warns once of those.
    """
    warning = admit(
        "SGLang",
        version("sglang"),
        known=KNOWN_VERSIONS,
        policy=policy_of(os.environ),
        find=lambda: differences(getattr(used, part), Sources.of("sglang")),
    )
    if warning:
        logger.warning("%s", warning)
