"""`kv_transfer_params`, which travel from the producer's answer, through any router, to the consumer's request.

The keys are those of vLLM's NixlConnector, and there are no others, because some routers pass on only the keys that
they know. Values for which NixlConnector has no key travel in `remote_request_id`.

Cache groups whose blocks are in one block table of the engine, as several of DeepSeek-V4's are, have the same ids: each
list of them travels once. Then the numbers that end `remote_request_id` are twice as many as there are groups: first
the first block of each group, and then the list of each, as an index into `remote_block_ids`. A build that does not
know this refuses the offer, since it counts more first blocks than lists.

A router that asks both engines at once draws a name and a secret for the transfer, and gives them to both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, structs

from kvconnector.errors import RemoteProtocolError
from kvconnector.ids import EngineAddress, EngineId, Id
from kvconnector.planning import MAX_TOKENS, GroupBlocks
from kvconnector.session.orders import HoldRequest
from kvconnector.topology import EngineGeometry

# the wire's own types: a peer would end the connection, and with it other requests, over an invalid value
from kvconnector.wire.messages import Secret128

BlockId = Annotated[int, Meta(ge=0, lt=1 << 31)]

MAX_SHARING = 256
"""Most cache groups of an offer that names a list once for several: a short text must not become a long order."""
FOLDED = ("transfer_secret", "remote_public_key", "remote_first_blocks")
"""Fields that follow the request's name in `remote_request_id`."""
FOLDED_ID = re.compile(
    # no block id is longer, and Python refuses to parse much longer numbers
    r"(.+)\|([0-9a-f]{32})\|([^|]{0,40})\|((?:[0-9]{0,10},)*[0-9]{0,10})",
    re.DOTALL,
)


class StreamRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A router's request to a producer whose prompt a consumer reads while it is computed."""

    transfer_id: Id
    transfer_secret: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]

    @classmethod
    def from_mapping(cls, params: Mapping[str, Any]) -> StreamRequest | None:
        """Return the stream that a request's parameters name; None if they name no transfer.

        Raises:
            RemoteProtocolError: a key is missing, or a value has the wrong type or range.
        """
        if not wants_remote_decode(params) or "transfer_id" not in params:
            return None
        return _converted(params, cls)


class TransferParams(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A producer's offer. `remote_block_ids` has a list for each cache group, for the first `remote_num_tokens` tokens.
    It is empty while the producer computes the prompt: then its workers report the blocks. If groups share lists,
    `remote_lists` has the index of each group's list; it is not a key of its own.
    """

    remote_engine_id: Id
    remote_request_id: Id
    remote_block_ids: tuple[tuple[BlockId, ...], ...]
    remote_host: Id
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_num_tokens: Annotated[int, Meta(ge=0, lt=1 << 31)]
    transfer_secret: Secret128
    tp_size: Annotated[int, Meta(ge=1)] = 1
    pp_size: Annotated[int, Meta(ge=1)] = 1
    remote_first_blocks: tuple[BlockId, ...] = ()
    remote_lists: tuple[BlockId, ...] = ()
    remote_public_key: Annotated[str, Meta(max_length=40)] = ""
    do_remote_prefill: bool = True
    do_remote_decode: bool = False

    @classmethod
    def of(
        cls,
        hold: HoldRequest,
        num_tokens: int,
        engine: EngineGeometry,
        address: str,
        key: str,
        *,
        tables: Sequence[int] = (),
    ) -> TransferParams:
        """Return the offer of a request that is held, whose directory service listens at `address` with this key.
        `tables` has the number of each group's block table; without it each group has its own.
        """
        place = urlsplit(address)
        firsts = tuple([group.first_block for group in hold.blocks])
        lists, numbers = _named_once(hold.blocks, tables)
        return cls(
            remote_engine_id=engine.engine_id,
            remote_request_id=hold.transfer_id,
            remote_block_ids=lists,
            remote_host=str(place.hostname),
            remote_port=int(place.port or 0),
            remote_num_tokens=num_tokens,
            transfer_secret=hold.secret,
            tp_size=engine.tp_size,
            pp_size=engine.pp_size,
            remote_first_blocks=firsts if any(firsts) or numbers else (),
            remote_lists=numbers,
            remote_public_key=key,
        )

    @property
    def engine(self) -> EngineAddress:
        """The producer, and where its directory service listens."""
        host = f"[{self.remote_host}]" if ":" in self.remote_host else self.remote_host
        address = f"tcp://{host}:{self.remote_port}"
        return EngineAddress(EngineId(self.remote_engine_id), address, self.remote_public_key)

    @property
    def is_followed(self) -> bool:
        """Returns True if the prompt is loaded while the producer computes it."""
        return not self.remote_block_ids

    @property
    def num_groups(self) -> int:
        """Number of cache groups whose blocks are named; 0 while the producer computes the prompt."""
        return len(self.remote_lists or self.remote_block_ids)

    def first_block(self, group: int) -> int:
        """Index, in the sequence, of the first of a group's blocks."""
        return self.remote_first_blocks[group] if self.remote_first_blocks else 0

    def num_blocks(self, group: int) -> int:
        """Number of a group's blocks."""
        return len(self.remote_block_ids[self.remote_lists[group] if self.remote_lists else group])

    def blocks(self) -> tuple[GroupBlocks, ...]:
        """Return the producer's blocks, by cache group. Raises BlockIdError: block ids that no pool has."""
        lists = [GroupBlocks.of(ids) for ids in self.remote_block_ids]
        numbers = self.remote_lists or range(len(lists))
        return tuple(
            [
                structs.replace(lists[number], first_block=self.first_block(group))
                for group, number in enumerate(numbers)
            ]
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the offer in its JSON form."""
        mapping: dict[str, Any] = msgspec.to_builtins(self)
        mapping["remote_block_ids"] = [list(ids) for ids in self.remote_block_ids]
        secret, key, firsts = (mapping.pop(name) for name in FOLDED)
        numbers = (*firsts, *mapping.pop("remote_lists"))
        folded = (self.remote_request_id, secret, key, ",".join(map(str, numbers)))
        return mapping | {"remote_request_id": "|".join(folded)}

    @classmethod
    def from_mapping(cls, params: Mapping[str, Any]) -> TransferParams:
        """Return a producer's offer from a request's mapping; keys that others add are ignored.

        The values in `remote_request_id` may have keys of their own, as older releases send them. These take
        precedence.

        Raises:
            RemoteProtocolError: a key is missing, or a value has the wrong type or range.
        """
        if "transfer_id" in params and not params.get("remote_block_ids"):
            named = {"remote_request_id": params["transfer_id"], "remote_block_ids": []}
            nothing = {"remote_num_tokens": MAX_TOKENS, "remote_lists": []}
            return _converted({**params, **named, **nothing}, cls)
        parsed = _converted(_unfolded(params) | {"remote_lists": []}, cls)
        if parsed.is_followed:
            raise RemoteProtocolError(
                "an offer must have a list of blocks for every cache group, even an empty one"
            )
        return parsed._with_lists_apart()

    def _with_lists_apart(self) -> TransferParams:
        """Return the offer with its lists' numbers apart from the first blocks, after which they travel.

        Raises:
            RemoteProtocolError: there are other first blocks than groups, or groups of other lists than there are.
        """
        numbers, num_lists = self.remote_first_blocks, len(self.remote_block_ids)
        if not numbers or len(numbers) == num_lists:
            return self
        num_groups, odd = divmod(len(numbers), 2)
        if odd or not num_lists < num_groups <= MAX_SHARING:
            raise RemoteProtocolError(
                "remote_first_blocks names a different number of cache groups",
                remote_first_blocks=len(numbers),
                remote_block_ids=num_lists,
            )
        lists = numbers[num_groups:]
        if set(lists) != set(range(num_lists)):
            raise RemoteProtocolError(
                "the indices of shared lists do not match remote_block_ids: the router must pass it on unchanged",
                shared=sorted(set(lists)),
                remote_block_ids=num_lists,
            )
        return structs.replace(self, remote_first_blocks=numbers[:num_groups], remote_lists=lists)


def _named_once(
    blocks: Sequence[GroupBlocks], tables: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the lists of block ids, of which groups of one table share equal ones, and the index of each group's list.

    There are no indices if no list is shared. Groups of one table may have unlike lists: one of a window lacks the
    blocks that are gone.
    """
    ids = [tuple(group.block_ids.tolist()) for group in blocks]
    if not tables or len(ids) > MAX_SHARING:
        return tuple(ids), ()
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    numbers = [found.setdefault(each, len(found)) for each in zip(tables, ids, strict=True)]
    lists = tuple([ids for _, ids in found])
    return lists, tuple(numbers) if len(lists) < len(numbers) else ()


_NAMED = ("remote_engine_id", "remote_host", "remote_port")
"""Keys that an error may show, without secrets."""
ParamsT = TypeVar("ParamsT", TransferParams, StreamRequest)


def _converted(params: Mapping[str, Any], kind: type[ParamsT]) -> ParamsT:
    try:
        converted = msgspec.convert(dict(params), kind)
        for text in msgspec.structs.astuple(converted):
            if isinstance(text, str):
                text.encode()  # JSON may have text that no message can carry: half of a surrogate pair
        return converted
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        named = {name: params.get(name) for name in _NAMED}
        raise RemoteProtocolError(f"kv_transfer_params cannot be used: {error}", **named) from error


def _unfolded(params: Mapping[str, Any]) -> dict[str, Any]:
    folded = params.get("remote_request_id")
    found = FOLDED_ID.fullmatch(folded) if isinstance(folded, str) else None
    if found is None:
        return dict(params)
    request_id, secret, key, firsts = found.groups()
    first_blocks = [int(first) for first in firsts.split(",") if first]
    return {
        **dict(zip(FOLDED, (secret, key, first_blocks), strict=True)),
        **params,
        "remote_request_id": request_id,
    }


def has_secret(params: Mapping[str, Any]) -> bool:
    """Returns True if parameters have a transfer's secret, alone or within the request's name, as those of ours do."""
    return "transfer_secret" in _unfolded(params)


def wants_remote_prefill(params: Mapping[str, Any] | None) -> bool:
    """Returns True if a request's blocks are on a producer."""
    return params is not None and params.get("do_remote_prefill") is True


def wants_remote_decode(params: Mapping[str, Any] | None) -> bool:
    """Returns True if a consumer will ask for a request's blocks."""
    return params is not None and params.get("do_remote_decode") is True
