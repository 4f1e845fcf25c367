"""Control messages. Frozen, tagged by the envelope's kind, append-only: a new field goes last and has a default.

Consumer to scheduler of the producer: `DirectoryRequest`. Consumer worker to producer worker: `Hello`, `Read`,
`CancelRead`, `Done`, `Abort`, `Heartbeat`, `Probe`; the producer worker answers with the others. Messages that a side
sends at the same time may be sent as one `Batch`.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnector.ids import PRINTED, Id
from kvconnector.layout import NO_TOKENS, GroupBlocks, Watermark
from kvconnector.topology import Segment
from kvconnector.topology.segments import MAX_SEGMENTS, Index
from kvconnector.wire.export import PoolExport
from kvconnector.wire.packed_geometry import PackedGeometry

MAX_TEXT = 4096
"""The most characters of a reason. The sender cuts longer ones off."""
Text = Annotated[str, Meta(max_length=MAX_TEXT, pattern=PRINTED)]
TAG_BITS = 62
Tag = Annotated[int, Meta(ge=0, lt=1 << TAG_BITS)]
# ASCII, because Python compares in constant time ASCII text only. `$` would also match before a final newline.
Secret128 = Annotated[str, Meta(pattern=r"\A[!-~]{32}\Z")]

MAX_NAMED = 256
"""Most transfers that one heartbeat names. A consumer that wants more sends more heartbeats."""
MAX_BATCH_MESSAGES = 1024
MAX_EXTRA_BYTES = 256
CHUNK_TAG_BITS = 20
"""A read's chunk `i` travels under tag `first_tag + i`; 2^20 chunks a read at most."""


UNSTATED_VERSION = 3
"""The wire version of releases that state none."""


class Refusal(StrEnum):
    """Reasons of a refusal; `wire.refusal_error` maps these to exceptions."""

    INCOMPATIBLE = "incompatible"
    UNKNOWN_TRANSFER = "unknown_transfer"
    LEASE_EXPIRED = "lease_expired"
    ABORTED = "aborted"
    STALE_INCARNATION = "stale_incarnation"
    INVALID_READ = "invalid_read"
    NOT_GREETED = "not_greeted"
    INTERNAL = "internal"
    RECLAIMED = "reclaimed"
    """Since wire version 4; peers of version 3 get `LEASE_EXPIRED`."""


class Message(msgspec.Struct, frozen=True, array_like=True, kw_only=True, gc=False):
    """Base of all messages: encoded as arrays, in the order of the fields. None is part of a reference cycle."""


class DirectoryRequest(Message, frozen=True, kw_only=True):
    """Asks an engine's scheduler for its workers; with `any_engine`, no matter what the engine's name is. `ranks` are
    the indices, among `world_size` ranks, whose addresses are requested, None for all; the answer may have more. The
    asking engine speaks the wire versions from `oldest_version` to `newest_version`, and takes answers of
    `max_message_bytes`, 0 if not stated.
    """

    engine_id: Id
    any_engine: bool = False
    ranks: Annotated[tuple[Index, ...], Meta(max_length=1 << 16)] | None = None
    world_size: Annotated[int, Meta(ge=1, lt=1 << 31)] = 1
    oldest_version: Index = UNSTATED_VERSION
    newest_version: Index = UNSTATED_VERSION
    max_message_bytes: Index = 0


class WorkerEntry(Message, frozen=True, kw_only=True):
    """One worker of a directory: the address of its control channel."""

    pp_rank: Index
    tp_rank: Index
    control_address: Id
    public_key: Annotated[str, Meta(max_length=40)]
    incarnation: Id


class Directory(Message, frozen=True, kw_only=True):
    """An engine's geometry, and all or the requested ones of its workers, in rank order. `stream` is its setting of
    that name. Both engines use `wire_version` from now on. Its workers take messages of `max_message_bytes`, 0 if not
    stated.
    """

    geometry: PackedGeometry
    workers: tuple[WorkerEntry, ...]
    library_version: Text = ""
    stream: bool = True
    wire_version: Index = UNSTATED_VERSION
    max_message_bytes: Index = 0


class DirectoryRefused(Message, frozen=True, kw_only=True):
    """The directory service refuses a request: it serves another engine, does not accept such a message, or failed."""

    refusal: Refusal
    text: Text


class ControlInbox(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """The address for messages to the sender over UCX, and the key that seals them: see `control.sealed`."""

    inbox_id: Annotated[int, Meta(ge=1, lt=1 << 62)]
    key: Annotated[bytes, Meta(min_length=32, max_length=32)]
    max_message_bytes: Annotated[int, Meta(ge=1024, lt=1 << 31)]


class Hello(Message, frozen=True, kw_only=True):
    """A consumer worker introduces itself. The producer connects to `transport_address` and sends `warm_up_bytes`
    under `warm_up_tag`, so that lanes and memory mappings exist before the first read. `timeout_ms` is how long the
    sender waits for a silent peer, 0 if not stated; both sides use the shorter one. `segments` are those of all its
    reads from this producer worker. It takes messages of `max_message_bytes`, 0 if not stated. `control` is its
    inbox, if messages to it may travel over UCX.
    """

    geometry: PackedGeometry
    pp_rank: Index
    tp_rank: Index
    incarnation: Id
    transport_address: Annotated[bytes, Meta(max_length=1 << 16)]
    warm_up_tag: Tag
    warm_up_bytes: Index
    library_version: Text = ""
    control: ControlInbox | None = None
    timeout_ms: Index = 0
    segments: Annotated[tuple[Segment, ...], Meta(max_length=MAX_SEGMENTS)] = ()
    max_message_bytes: Index = 0


class HelloReply(Message, frozen=True, kw_only=True):
    """The producer worker's answer to a `Hello`; with a refusal, whose reason is `text`, the session ends.

    The consumer connects to `transport_address` (unless empty) to learn of the loss of the producer, and plans no chunk
    above `max_chunk_bytes` (unless 0). On the same host it may read the pools itself, through `export`. `timeout_ms`,
    `max_message_bytes`, `control`: see `Hello`. A lease lasts `lease_ms` unless it is renewed, 0 if not stated.

    Without an export, `text` may say why there is none.

    A further reply only replaces `export`: by none before the pools' memory is taken away, until the consumer has
    unmapped it and says so in a heartbeat, and by another once there is new memory or more of it.
    """

    incarnation: Id
    refusal: Refusal | None = None
    text: Text = ""
    transport_address: Annotated[bytes, Meta(max_length=1 << 16)] = b""
    max_chunk_bytes: Index = 0
    export: PoolExport | None = None
    control: ControlInbox | None = None
    timeout_ms: Index = 0
    lease_ms: Index = 0
    max_message_bytes: Index = 0


def stated_timeout_ms(seconds: float) -> int:
    """Return a timeout as greetings state it: at least 1, because 0 means that none is stated. Settings are at most
    10^6 seconds, which fits into a greeting.
    """
    return max(int(seconds * 1000), 1)


def shorter_timeout_s(ours_s: float, theirs_ms: int) -> float:
    """Return the timeout that two peers use."""
    return min(ours_s, theirs_ms / 1000) if theirs_ms else ours_s


class Read(Message, frozen=True, kw_only=True):
    """Asks for chunks, sent under the tags `first_tag + i`, at most `window` of them unreceived at a time.

    They hold the tokens `[start, stop)` of each cache group in `layers` (`[first, stop)`, global indices), as far as
    the greeting's segments have them, cut by `planning.SourceRead.chunks` into `num_chunks` chunks of at most
    `chunk_bytes`. `incarnation` names the start of the producer that the read is meant for. `blocks` is empty for a
    prompt that is followed, because the producer itself has named them.
    """

    transfer_id: Id
    secret: Secret128
    read_id: Tag
    incarnation: Id
    token_ranges: Annotated[tuple[tuple[Index, Index], ...], Meta(max_length=1 << 16)]
    layers: tuple[Index, Index]
    chunk_bytes: Index
    num_chunks: Index
    blocks: tuple[GroupBlocks, ...]
    window: Annotated[int, Meta(ge=1, le=1024)]
    first_tag: Tag


class ReadRefused(Message, frozen=True, kw_only=True):
    """Nothing of this read was or will be sent."""

    read_id: Tag
    refusal: Refusal
    text: Text


class ReadEnded(Message, frozen=True, kw_only=True):
    """The read stopped early: exactly the first `sent_chunks` chunks were or are being sent."""

    read_id: Tag
    sent_chunks: Index
    refusal: Refusal
    text: Text


class CancelRead(Message, frozen=True, kw_only=True):
    """The consumer wants no more chunks; answered by `ReadEnded` unless everything was sent."""

    read_id: Tag


class TransferKey(Message, frozen=True, kw_only=True):
    """A transfer, and the secret that gives access to it."""

    transfer_id: Id
    secret: Secret128


class Done(TransferKey, frozen=True, kw_only=True):
    """This consumer rank has everything that it needs of the transfer, whether it has read it or not."""


class Abort(TransferKey, frozen=True, kw_only=True):
    """The consumer gave up the request: the producer may free its blocks."""


class Follow(TransferKey, frozen=True, kw_only=True):
    """An entry of a heartbeat: the consumer follows a prompt, and has received no report on it yet. The producer
    answers with a `Progress` as soon as it knows the transfer, and sends another whenever more of the prompt is
    computed.
    """


class Progress(Message, frozen=True, kw_only=True):
    """A prompt is computed up to the watermark, in `blocks`, by cache group; a group whose blocks are not known yet has
    none. Blocks without tokens mean that the prompt is about to be computed. Each `Progress` repeats all that
    earlier ones reported. One that `is_complete`, or has a refusal, is the last. A complete one may have a few bytes
    of `extra` from the producer's engine for the consumer's, such as the token that it sampled. `secret` is the
    follower's; earlier releases send none.
    """

    transfer_id: Id
    watermark: Watermark = NO_TOKENS
    blocks: tuple[GroupBlocks, ...] = ()
    is_complete: bool = False
    refusal: Refusal | None = None
    text: Text = ""
    extra: Annotated[bytes, Meta(max_length=MAX_EXTRA_BYTES)] = b""
    secret: Annotated[str, Meta(max_length=32)] = ""


class Heartbeat(Message, frozen=True, kw_only=True):
    """The consumer is alive, and still wants the transfers that it names: their leases are renewed. It names each of
    them once per interval, in as many heartbeats as that takes. `number` counts a link's heartbeats from 1; 0 means not
    numbered. `maps_pools`: the consumer has opened the producer's export, which it closes before it disconnects, or it
    may be about to, as its greeting is not answered yet.
    """

    transfers: Annotated[tuple[TransferKey, ...], Meta(max_length=MAX_NAMED)]
    number: Index = 0
    maps_pools: bool = False
    followed: Annotated[tuple[Follow, ...], Meta(max_length=MAX_NAMED)] = ()


class Probe(Message, frozen=True, kw_only=True):
    """Asks for `count` messages of `nbytes`, at most a slot's size, under tags from `first_tag` on: a measurement."""

    first_tag: Tag
    nbytes: Index
    count: Annotated[int, Meta(ge=1, le=64)]


class HeartbeatReply(Message, frozen=True, kw_only=True):
    """The producer is alive, and has received this heartbeat."""

    number: Index = 0


class Bye(Message, frozen=True, kw_only=True):
    """An orderly end of the session."""

    text: Text = ""


class Batch(Message, frozen=True, kw_only=True):
    """Several messages, in their order, each with its envelope. None of them is a batch."""

    messages: Annotated[tuple[bytes, ...], Meta(min_length=1, max_length=MAX_BATCH_MESSAGES)]
