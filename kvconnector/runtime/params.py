"""`kv_transfer_params`: what travels from the producer's answer, through any router, to the consumer's request.

The keys are those of vLLM's NixlConnector, so that routers which know it need no change; `transfer_secret`,
`remote_public_key` and `remote_first_blocks` are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from kvconnector.errors import RemoteProtocolError

# the wire's own types: a peer would end the connection, and with it other requests, over a value that it does not take
from kvconnector.wire.messages import Id, Secret128

BlockId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Text = Annotated[str, Meta(min_length=1, max_length=512)]


class TransferParams(msgspec.Struct, frozen=True, kw_only=True):
    """A producer's offer. `remote_block_ids` has one list a cache group, for the first `remote_num_tokens` tokens."""

    remote_engine_id: Id
    remote_request_id: Id
    remote_block_ids: list[list[BlockId]]
    remote_host: Text
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_num_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)]
    transfer_secret: Secret128
    tp_size: Annotated[int, Meta(ge=1)] = 1
    pp_size: Annotated[int, Meta(ge=1)] = 1
    remote_first_blocks: list[BlockId] = []
    remote_public_key: Annotated[str, Meta(max_length=40)] = ""
    do_remote_prefill: bool = True
    do_remote_decode: bool = False

    @property
    def address(self) -> str:
        """Where the producer's directory service listens."""
        host = f"[{self.remote_host}]" if ":" in self.remote_host else self.remote_host
        return f"tcp://{host}:{self.remote_port}"

    def first_block(self, group: int) -> int:
        """Index, in the sequence, of the first of a group's blocks."""
        return self.remote_first_blocks[group] if self.remote_first_blocks else 0

    def to_mapping(self) -> dict[str, Any]:
        """As JSON carries it."""
        return msgspec.to_builtins(self)  # type: ignore[no-any-return]  # a struct becomes a dict

    @classmethod
    def from_mapping(cls, params: Mapping[str, Any]) -> TransferParams:
        """A producer's offer as a request carries it; keys that others add are ignored.

        Raises:
            RemoteProtocolError: a key is missing, or a value has the wrong type or range.
        """
        try:
            parsed = msgspec.convert(dict(params), cls)
        except msgspec.ValidationError as error:
            raise RemoteProtocolError(f"kv_transfer_params cannot be used: {error}") from error
        firsts = parsed.remote_first_blocks
        if firsts and len(firsts) != len(parsed.remote_block_ids):
            raise RemoteProtocolError(
                "remote_first_blocks names another number of cache groups",
                remote_first_blocks=len(firsts),
                remote_block_ids=len(parsed.remote_block_ids),
            )
        return parsed


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Whether a request's blocks are on a producer."""
    return bool(params) and params is not None and params.get("do_remote_prefill") is True


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Whether a request's blocks will be asked for by a consumer."""
    return bool(params) and params is not None and params.get("do_remote_decode") is True
