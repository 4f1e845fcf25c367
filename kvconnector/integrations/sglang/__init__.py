"""The entry point of the SGLang backend. SGLang's plugin loader calls `register` in every process.

SGLang lists its transfer backends in an Enum and finds their classes with a chain of comparisons. `register` replaces
the Enum by one that has our backend too, and wraps the lookup. It wraps the check of a model's options, which refuses
all backends but one for a cache that is split by layers. In a server's main process it also wraps the request to
release memory, so that one that failed has an error for its answer. It imports and changes nothing else, because it
also runs where another backend is chosen.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from enum import Enum
from importlib.metadata import version
from typing import Any

from kvconnector.errors import LocalError
from kvconnector.integrations.sglang.shared import KNOWN_VERSIONS, NOT_RELEASED, check_release

logger = logging.getLogger(__name__)

NAME = "kvconnector"
UTILS = "sglang.srt.disaggregation.utils"
CONTROLS = "sglang.srt.managers.tokenizer_control_mixin"
OPTIONS_OF_MODEL = "handle_model_specific_adjustments"


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
    """Let SGLang's command line accept the backend's name, and a cache split by layers with it. Idempotent."""
    from sglang.srt.arg_groups import choices

    if NAME in choices.DISAGG_TRANSFER_BACKEND_CHOICES:
        return
    choices.add_disagg_transfer_backend_choices([NAME])
    try:
        from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

        register_resolution_hook(OPTIONS_OF_MODEL)(admit_split)
    except (ImportError, ValueError) as error:  # all else works
        logger.warning("SGLang will refuse --enable-dsa-cache-layer-split: %s", error)


def admit_split(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Let SGLang split a cache by layers with our backend: a hook around its step `OPTIONS_OF_MODEL`.

    The step accepts that option for the backend mooncake alone, and checks much else, which must stay checked. It reads
    an option from the declarations of earlier steps, and from the command line only if none of them has it. So while
    the step runs, we add a declaration that the backend is mooncake.
    """
    is_ours = getattr(server_args, "disaggregation_transfer_backend", "") == NAME
    is_split = getattr(server_args, "enable_dsa_cache_layer_split", False)
    declarations = getattr(server_args, "_resolved_overrides", None)
    # a release without any of these refuses the option, or has not got it
    if not (is_ours and is_split and isinstance(declarations, list)):
        previous(server_args)
        return
    declared = (NAME, {"disaggregation_transfer_backend": "mooncake"})
    declarations.append(declared)
    try:
        previous(server_args)
    finally:
        # it is no longer the last one
        server_args._resolved_overrides[:] = [
            each for each in server_args._resolved_overrides if each is not declared
        ]


def platform() -> None:
    """Let SGLang's command line accept the backend's name in launchers that load no plugins before they read it, such
    as Dynamo's. An entry point of `sglang.srt.platforms`, which SGLang calls when it looks for the machine's platform,
    as importing its arguments does. We use the entry point for this side effect alone, and name no platform.
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
    if CONTROLS in sys.modules:  # where requests for it come
        release = f"{CONTROLS}.TokenizerControlMixin.release_memory_occupation"
        HookRegistry.register(release, release_or_raise, HookType.AROUND)


def _class_of(original: Callable[[Any, Any], Any], backend: Any, class_type: Any) -> Any:
    """Return the class that SGLang requests. Raises ConfigError: this version of SGLang is not supported."""
    if backend.value != NAME:
        return original(backend, class_type)
    check_release()
    from kvconnector.integrations.sglang.backend import CLASSES, hook_queues

    if class_type.value == "kvargs":  # which a queue asks for first
        hook_queues()
    return CLASSES.get(class_type.value)


async def release_or_raise(
    original: Callable[..., Any], manager: Any, obj: Any, *others: Any
) -> None:
    """Have all schedulers release memory, as SGLang does. Raises LocalError: one has not, because it is in use."""
    if manager.server_args.disaggregation_transfer_backend != NAME:
        await original(manager, obj, *others)
        return
    manager.auto_create_handle_loop()
    answers = [each.rid or "" for each in await manager.release_memory_occupation_communicator(obj)]
    if kept := [
        each.removeprefix(NOT_RELEASED) for each in answers if each.startswith(NOT_RELEASED)
    ]:
        raise LocalError(
            "no memory was released and transfers continue, because some did not end in time",
            reasons=kept,
            servers=f"{len(kept)} of {len(answers)}",
        )
