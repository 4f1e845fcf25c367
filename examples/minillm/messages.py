"""Messages between the scheduler process and its ranks: msgspec structs over ZMQ, no pickle."""

from __future__ import annotations

from typing import Literal

import msgspec

EMPTY = msgspec.Raw(msgspec.msgpack.encode(None))


class SequenceInput(msgspec.Struct, frozen=True, array_like=True):
    """One request's share of a step: compute `token_ids` at positions `start...` and cache them in its blocks."""

    request_id: str
    token_ids: list[int]
    start: int
    num_samples: int
    """Number of tokens to sample after the last of these, the likeliest first; 0 if the next token is known."""
    encoder_token_ids: list[int] = []
    """In a prompt's first step: encode these first, and cache the result in the request's cross-attention blocks."""
    num_encoder_tokens: int = 0
    """Number of tokens of the encoder's input, encoded now or earlier."""


def stored_event(item: SequenceInput) -> str:
    """Return the cache event of a step's sequence: its tokens up to this step's end are stored."""
    return f"{item.request_id}:{item.start + len(item.token_ids)}"


def block_number(group: int, block_id: int, num_groups: int) -> int:
    """Return a block of a cache group as one number, different from those of other groups' blocks."""
    return block_id * num_groups + group


class NewRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request whose block tables the ranks do not have."""

    req_id: str
    block_ids: list[list[int]]
    """By cache group."""


class RunningRequests(msgspec.Struct, frozen=True, array_like=True):
    """Requests whose tables change, in parallel lists. New blocks follow the known ones; those of resumed requests
    replace them.
    """

    req_ids: list[str] = []
    new_block_ids: list[list[list[int]] | None] = []
    resumed_req_ids: set[str] = set()


class TableChanges(msgspec.Struct, frozen=True, array_like=True):
    """A step's changes to the ranks' block tables, as `yield_req_data` reads them. Finished requests come first."""

    scheduled_new_reqs: list[NewRequest] = []
    scheduled_cached_reqs: RunningRequests = msgspec.field(default_factory=RunningRequests)
    finished_req_ids: list[str] = []


MoveKind = Literal["out", "in", "copy"]


class BlockMove(msgspec.Struct, frozen=True, array_like=True):
    """Blocks of one pool to copy: out to host memory, in from there, or inside the pool. No block is a target twice."""

    pool: int
    kind: MoveKind
    pairs: list[tuple[int, int]]
    """(source id, destination id)."""


class Step(msgspec.Struct, tag="step"):
    """One engine step. Without inputs it is idle: it only serves the connector, for up to `idle_wait_s`.

    `moves` come first, in their order, because the connector and the sequences may write to blocks that they read. Then
    come changed tables, then the sequences. The scheduler fills in these, the engine the rest.
    """

    step_id: int = 0
    inputs: list[SequenceInput] = []
    tables: TableChanges = msgspec.field(default_factory=TableChanges)
    moves: list[BlockMove] = []
    common_blocks: list[int] = []
    """Number of leading blocks that all sequences share, by cache group; empty for none."""
    connector: msgspec.Raw = EMPTY
    """This step's connector metadata, encoded; empty in an engine without a connector."""
    idle_wait_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Number of tokens to compute."""
        return sum(len(item.token_ids) for item in self.inputs)


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Close the connector, leave the process groups, exit 0."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """A rank has its weights, its cache and its registered connector."""

    connector: msgspec.Raw = EMPTY


class SampledToken(msgspec.Struct, frozen=True, array_like=True):
    """A greedy token and its natural-log probability."""

    token_id: int
    logprob: float


class StepResult(msgspec.Struct, frozen=True, tag="result"):
    """One rank's results of a step. Only the last stage's first rank fills `tokens`."""

    step_id: int
    tokens: dict[str, list[SampledToken]] = {}
    connector: msgspec.Raw = EMPTY


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A rank hit an error it cannot continue after."""

    error: str


ToWorker = Step | Shutdown
FromWorker = Ready | StepResult | Failed

to_worker_decoder = msgspec.msgpack.Decoder(ToWorker)
from_worker_decoder: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
encoder = msgspec.msgpack.Encoder()
