"""Ray Serve's set-up of engines with `KVConnector`: unique ids, and the node's address for the control channel."""

from __future__ import annotations

CONNECTOR_NAME = "KVConnector"
BACKEND = "ray.llm._internal.serve.engines.vllm.kv_transfer.nixl:NixlConnectorBackend"
"""Ray's own set-up for NixlConnector: it sets `VLLM_NIXL_SIDE_CHANNEL_HOST` and `_PORT`, on which KVConnector listens,
and appends both to the engine's id. Without it every engine would listen on its own loopback."""


def register() -> None:
    """Make Ray Serve set up `KVConnector` as it does NixlConnector. To be called where the application is built."""
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

    if not KVConnectorBackendFactory.is_registered(CONNECTOR_NAME):
        KVConnectorBackendFactory.register_backend(CONNECTOR_NAME, BACKEND)
