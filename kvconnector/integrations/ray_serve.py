"""Lets Ray Serve set up engines with `KVConnector`: unique engine ids, and the node's address for control messages."""

from __future__ import annotations

CONNECTOR_NAME = "KVConnector"
BACKEND = "ray.llm._internal.serve.engines.vllm.kv_transfer.nixl:NixlConnectorBackend"
"""Ray's set-up for NixlConnector. It sets `VLLM_NIXL_SIDE_CHANNEL_HOST` and `_PORT`, on which KVConnector listens too,
and appends both to the engine's id. Without it every engine would listen on its own loopback interface."""


def register() -> None:
    """Make Ray Serve set up `KVConnector` as it does NixlConnector. Call this where the application is built."""
    from ray.llm._internal.serve.engines.vllm.kv_transfer.factory import KVConnectorBackendFactory

    if not KVConnectorBackendFactory.is_registered(CONNECTOR_NAME):
        KVConnectorBackendFactory.register_backend(CONNECTOR_NAME, BACKEND)
