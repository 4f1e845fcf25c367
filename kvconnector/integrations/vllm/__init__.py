"""vLLM's KV connector, as a class that `--kv-transfer-config` names.

    {"kv_connector": "KVConnector", "kv_connector_module_path": "kvconnector.integrations.vllm",
     "kv_role": "kv_producer"}

Launchers that know NixlConnector's name alone (NVIDIA Dynamo) find the same class under that name in this module.
Nothing of vLLM is imported until the class is asked for: vLLM loads `register` as a plugin in each of its processes,
also in those that serve no connector.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvconnector.integrations.vllm.versions import SUPPORTED_VLLM

if TYPE_CHECKING:
    from kvconnector.integrations.vllm.connector import KVConnector

__all__ = ["SUPPORTED_VLLM", "KVConnector", "register"]

CONNECTOR_NAME = "KVConnector"


def register() -> None:
    """Make `KVConnector` known by name (the `vllm.general_plugins` entry point).

    vLLM's `MultiConnector` finds the classes of its children by name alone.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR_NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR_NAME, __name__, CONNECTOR_NAME)


def __getattr__(name: str) -> object:
    if name not in {CONNECTOR_NAME, "NixlConnector"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvconnector.integrations.vllm.versions import check_version

    check_version()
    from kvconnector.integrations.vllm.connector import KVConnector

    return KVConnector
