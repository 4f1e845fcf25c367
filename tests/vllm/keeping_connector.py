"""A second connector for a `MultiConnector`: it keeps every finished request's blocks, as one that saves them would."""

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


class KeepingConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Blocks stay until `finished_sending` names the request. `loads` of them have that many tokens for each."""

    loads = 0

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        tokens = self.loads if num_computed_tokens < self.loads else 0
        return tokens, tokens > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        """Nothing to remember."""

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request, block_ids):
        return True, None


# the rest of the interface is the workers', and there are none
KeepingConnector.__abstractmethods__ = frozenset()
