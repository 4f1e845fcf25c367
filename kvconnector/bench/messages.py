"""What a benchmark's parent and its children say to each other: msgpack structs, each behind its length, on a socket.

The parent plays both engines' schedulers and the router; a child is one rank of one engine.
"""

from __future__ import annotations

import socket
import struct
from typing import Literal, TypeAlias

import msgspec

from kvconnector.bench.contract import PeerName
from kvconnector.bench.shapes import EngineShape, ModelShape
from kvconnector.config import ConnectorConfig
from kvconnector.errors import KVConnectorError, PeerLostError, TransferTimeoutError
from kvconnector.runtime import StepMetadata, WorkerMetadata

_LENGTH = struct.Struct("<I")


class ChildFailedError(KVConnectorError):
    """A benchmark's child process failed or ended; the text is its own or the end of its log."""


class Open(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Make the pools of one rank, poisoned. First message of every child. Answer: `Ok`."""

    model: ModelShape
    shape: EngineShape
    pp_rank: int
    tp_rank: int
    num_blocks: int
    device: str
    seed: int
    timeout_s: float


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """Register the pools with a worker of this configuration. Answer: `Registered`."""

    config: ConnectorConfig


class Registered(msgspec.Struct, frozen=True, tag=True):
    """What the scheduler half needs of this rank."""

    metadata: WorkerMetadata


class Write(msgspec.Struct, frozen=True, tag=True):
    """Put the sequence into these blocks. Answer: `Ok`."""

    block_ids: tuple[int, ...]
    num_tokens: int


class Poison(msgspec.Struct, frozen=True, tag=True):
    """Fill the pools with poison. Answer: `Ok`."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """Compare these blocks with the sequence and all others with poison. Answer: `Checked`."""

    block_ids: tuple[int, ...]
    num_tokens: int


class Checked(msgspec.Struct, frozen=True, tag=True):
    """Empty if all is well."""

    mismatch: str


class Step(msgspec.Struct, frozen=True, tag=True):
    """Take a step's news; with `received` or `released`, wait for that request's report. Answer: `Stepped`."""

    step: StepMetadata
    received: str = ""
    released: str = ""


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """When the step was taken and when the engine's thread saw the report: seconds of the host's monotonic clock.

    `path`: how a load came, see `TransferStats`.
    """

    started_s: float
    ended_s: float
    path: str = ""


LoadName = Literal["idle", "torch", "python", "decode"]
"""What the engine's main thread does: nothing, small torch operations, pure Python, or a decode step's GPU kernels."""


class Drive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run the engine's main loop beside `steps`, one a request, until all are over and `min_s` has passed.

    `one_by_one`: each when the one before is over; else one in each turn of the loop. Answer: `Driven`.
    """

    load: LoadName
    request_ids: tuple[str, ...] = ()
    steps: tuple[StepMetadata, ...] = ()
    one_by_one: bool = False
    min_s: float = 0.0


class Driven(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the loop took. One a request: `request_s`, from `start_step` until the engine's thread saw the end, and
    `chunks_s`, what the data path took of it. `start_step_s` and `poll_s` are the seconds of all calls together.
    """

    request_s: tuple[float, ...]
    chunks_s: tuple[float, ...]
    path: str
    num_steps: int
    loop_s: float
    start_step_s: float
    poll_s: float


class OpenAgent(msgspec.Struct, frozen=True, tag=True):
    """Register the pools with a peer's agent of this name. Answer: `AgentOpened`."""

    peer: PeerName
    name: str
    num_threads: int


class AgentOpened(msgspec.Struct, frozen=True, tag=True):
    """The agent's metadata, and the pools' addresses in the order of their parts."""

    metadata: bytes
    addresses: tuple[int, ...]
    device_index: int


class JoinAgent(msgspec.Struct, frozen=True, tag=True):
    """Connect to the other engine's agent, and prepare what can be prepared. Answer: `Ok`."""

    peer: AgentOpened


class ReadBlocks(msgspec.Struct, frozen=True, tag=True):
    """Read blocks from the peer's pools into ours, one descriptor per block and part. Answer: `BlocksRead`."""

    remote: tuple[int, ...]
    local: tuple[int, ...]


class BlocksRead(msgspec.Struct, frozen=True, tag=True):
    """Seconds from the call that makes the request, and from the one that posts it, to its end."""

    request_s: float
    transfer_s: float


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Close everything and end. Answer: `Ok`."""


class Ok(msgspec.Struct, frozen=True, tag=True):
    """Done."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child could not do what it was asked."""

    text: str


Request: TypeAlias = (
    Open
    | StartWorker
    | Write
    | Poison
    | Check
    | Step
    | Drive
    | OpenAgent
    | JoinAgent
    | ReadBlocks
    | Stop
)
Answer: TypeAlias = Ok | Registered | Checked | Stepped | Driven | AgentOpened | BlocksRead | Failed

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def send_message(connection: socket.socket, message: msgspec.Struct) -> None:
    """Raises:
    PeerLostError: the other process is gone. TransferTimeoutError: it does not read.
    """
    payload = _encoder.encode(message)
    try:
        connection.sendall(_LENGTH.pack(len(payload)) + payload)
    except TimeoutError as error:
        raise TransferTimeoutError("a benchmark's process does not read its messages") from error
    except OSError as error:
        raise PeerLostError("a benchmark's process is gone") from error


def receive_request(connection: socket.socket) -> Request:
    """The next request; raises as `send_message`."""
    return _request_decoder.decode(_receive(connection))


def receive_answer(connection: socket.socket) -> Answer:
    """The next answer; raises as `send_message`."""
    return _answer_decoder.decode(_receive(connection))


def _receive(connection: socket.socket) -> bytes:
    (nbytes,) = _LENGTH.unpack(_read(connection, _LENGTH.size))
    return _read(connection, nbytes)


def _read(connection: socket.socket, nbytes: int) -> bytes:
    pieces: list[bytes] = []
    missing = nbytes
    while missing:
        try:
            piece = connection.recv(missing)
        except TimeoutError as error:
            raise TransferTimeoutError("a benchmark's process did not answer in time") from error
        except OSError as error:
            raise PeerLostError("a benchmark's process is gone") from error
        if not piece:
            raise PeerLostError("a benchmark's process is gone")
        pieces.append(piece)
        missing -= len(piece)
    return b"".join(pieces)
