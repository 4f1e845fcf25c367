"""vLLM's KV connector, as a class that `--kv-transfer-config` names.

    {"kv_connector": "KVConnector", "kv_connector_module_path": "kvconnector.integrations.vllm",
     "kv_role": "kv_producer"}

Launchers that know NixlConnector's name alone (NVIDIA Dynamo) find the same class under that name in this module.
`MultiConnector` of this module loads one request from several connectors. It has the name of vLLM's own, by which vLLM
looks at the configurations of the children.
Nothing of vLLM is imported until the class is asked for: vLLM loads `register` as a plugin in each of its processes,
also in those that serve no connector.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kvconnector.errors import ConfigError

if TYPE_CHECKING:
    from kvconnector.integrations.vllm.connector import KVConnector

__all__ = ["SUPPORTED_VLLM", "KVConnector", "register"]

CONNECTOR_NAME = "KVConnector"
SUPPORTED_VLLM = ((0, 32), (0, 33))
"""Major and minor numbers. vLLM changes its connector interface between minor releases.

0.33 differs: it has sleep mode with connectors, and calls `supports_sleep_mode`,
`unregister_kv_caches`, `restore_kv_caches` and, after each wake-up, `set_xfer_handshake_metadata_pp_aware` again.
"""


def register() -> None:
    """Make `KVConnector` known by name (the `vllm.general_plugins` entry point).

    vLLM's `MultiConnector` finds the classes of its children by name alone.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, __name__, CONNECTOR_NAME)


def __getattr__(name: str) -> object:
    if name not in {CONNECTOR_NAME, "NixlConnector", "MultiConnector"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm

    check_version(str(vllm.__version__))
    if name == "MultiConnector":
        from kvconnector.integrations.vllm.ranges import RangeConnector

        return RangeConnector
    from kvconnector.integrations.vllm.connector import KVConnector

    return KVConnector


def check_version(found: str) -> None:
    """Raises ConfigError: neither a supported release nor a development build, named 0.0.0 or dev."""
    release = re.match(r"(\d+)\.(\d+)", found)
    if release is None or release.group() in ("0.0", "0.1"):
        return
    if (int(release[1]), int(release[2])) not in SUPPORTED_VLLM:
        wanted = " and ".join(f"{major}.{minor}.x" for major, minor in SUPPORTED_VLLM)
        raise ConfigError(
            f"kvconnector's vLLM integration works with vLLM {wanted}: install one of these, or a release of"
            " kvconnector for yours",
            found=found,
        )
