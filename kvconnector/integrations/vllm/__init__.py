"""`KVConnector`, a KV connector for vLLM. Name it in `--kv-transfer-config`.

    {"kv_connector": "KVConnector", "kv_connector_module_path": "kvconnector.integrations.vllm",
     "kv_role": "kv_producer"}

Launchers that know only NixlConnector's name (NVIDIA Dynamo) find the same class under that name in this module. The
`MultiConnector` of this module loads one request from several connectors. It has the name of vLLM's own class, because
vLLM recognizes a configuration with children by that name.
This module imports nothing of vLLM before the class is used: vLLM calls `register` as a plugin in each of its
processes, even if they serve no connector.
"""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING

from kvconnector.errors import ConfigError
from kvconnector.integrations.contract import Sources, admit, differences, policy_of
from kvconnector.integrations.vllm import used

if TYPE_CHECKING:
    from kvconnector.integrations.vllm.connector import KVConnector

__all__ = ["SUPPORTED_VLLM", "KVConnector", "register"]

logger = logging.getLogger(__name__)

CONNECTOR_NAME = "KVConnector"
OFFLOADING = ("OffloadingConnector", "SimpleCPUOffloadConnector", "LMCacheMPConnector")
"""What `--kv-offloading-size` makes of the connector's name, while `kv_connector_module_path` stays."""
SUPPORTED_VLLM = ((0, 31), (0, 32), (0, 33))
"""Supported (major, minor) releases. vLLM changes its connector interface between minor releases.

Since 0.33 engines with connectors can sleep. vLLM then calls `supports_sleep_mode`, `unregister_kv_caches`,
`restore_kv_caches` and, after each wake-up, `set_xfer_handshake_metadata_pp_aware` again.
"""


def register() -> None:
    """Register `KVConnector` with vLLM by name. vLLM calls this through the `vllm.general_plugins` entry point.

    Its `MultiConnector` finds the classes of its children only by name.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, __name__, CONNECTOR_NAME)


def __getattr__(name: str) -> object:
    if name in OFFLOADING:
        raise ConfigError(
            "--kv-offloading-size replaces kvconnector's connector with one of vLLM's: leave the option out, and name"
            " the cache tier as another child of a MultiConnector (docs/vllm.md, Beside a cache tier)",
            kv_connector=name,
            kv_connector_module_path=__name__,
        )
    if name not in {CONNECTOR_NAME, "NixlConnector", "MultiConnector"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    check_version(str(vllm.__version__))
    if name == "MultiConnector":
        check_version(str(vllm.__version__), "RANGES")
        from kvconnector.integrations.vllm.ranges import RangeConnector

        return RangeConnector
    # `MultiConnector` finds the class of a child's statistics by name, even if it has found the child by its path
    register()
    from kvconnector.integrations.vllm.connector import KVConnector

    return KVConnector


def check_version(found: str, part: str = "ENTRIES") -> None:
    """Raise ConfigError unless this is a known release of vLLM, one that has all that `part` of `used.py` names, or a
    development build (0.0.0, 0.1 or dev).
    """
    release = re.match(r"(\d+)\.(\d+)", found)
    if release is None or release.group() in ("0.0", "0.1"):
        return
    known = [f"{major}.{minor}" for major, minor in SUPPORTED_VLLM]
    warning = admit(
        "vLLM",
        found,
        known=known,
        policy=policy_of(os.environ),
        find=lambda: differences(getattr(used, part), Sources.of("vllm")),
    )
    if warning:
        logger.warning("%s", warning)
