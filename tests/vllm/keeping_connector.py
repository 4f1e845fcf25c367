"""A second connector for a `MultiConnector`: it keeps every finished request's blocks, as one that saves them would."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class KeepingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Blocks stay until `finished_sending` names the request. `loads` of them have that many tokens for each."""

    loads = 0

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        tokens = self.loads if num_computed_tokens < self.loads else 0
        return tokens, tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing to remember."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        return True, None


# the rest of the interface is the workers', and there are none
KeepingConnector.__abstractmethods__ = frozenset()
