"""Hypothesis strategies for what engines say to each other."""

from __future__ import annotations

from typing import Any, TypeVar

from hypothesis import strategies as st

from kvconnector.topology import EngineGeometry
from kvconnector.wire import messages as m
from kvconnector.wire.export import (
    IPC_HANDLE_BYTES,
    NONCE_BYTES,
    ExportedTable,
    IpcAllocation,
    PoolExport,
)
from tests.support.strategies import engines, model_shapes

T = TypeVar("T")

# lone surrogates are no text that could be sent
_characters = st.characters(exclude_categories=["Cs"])
_ids = st.text(_characters, min_size=1, max_size=12)
_texts = st.text(_characters, max_size=12)
_secrets = st.text("0123456789abcdef", min_size=32, max_size=32)
_indices = st.integers(0, (1 << 31) - 1)
_tags = st.integers(0, (1 << 62) - 1)
_refusals = st.sampled_from(m.Refusal)
_bytes = st.binary(max_size=40)


def _tuples_of(elements: st.SearchStrategy[T]) -> st.SearchStrategy[tuple[T, ...]]:
    return st.lists(elements, max_size=4).map(tuple)


def _geometries() -> st.SearchStrategy[EngineGeometry]:
    return model_shapes().flatmap(engines)


def _segment(stripe: tuple[int, int, int], **values: Any) -> m.ReadSegment:
    first, run, period = stripe
    return m.ReadSegment(token_first=first, token_run=run, token_period=period, **values)


_entries = st.builds(
    m.WorkerEntry,
    pp_rank=_indices,
    tp_rank=_indices,
    control_address=_ids,
    public_key=st.text(_characters, max_size=40),
    incarnation=_ids,
)
_stripes = st.tuples(st.integers(0, 40), st.integers(1, 40), st.integers(0, 40)).map(
    lambda drawn: (drawn[0], drawn[1], sum(drawn))
)
_segments = st.builds(
    _segment,
    stripe=_stripes,
    group=_indices,
    family=_indices,
    first_layer=_indices,
    num_layers=_indices,
    head_start=_indices,
    head_stop=_indices,
    order=st.sampled_from(["HND", "NHD", "HDN"]),
)
_blocks = st.builds(m.ReadBlocks, first_block=_indices, block_ids=_bytes)
_keys = st.builds(m.TransferKey, transfer_id=_ids, secret=_secrets)
_addresses = st.integers(0, (1 << 63) - 1)
_counts = st.integers(1, (1 << 31) - 1)
_exports = st.builds(
    PoolExport,
    pid=_counts,
    nonce_address=_addresses,
    nonce=st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES),
    board_address=_addresses,
    num_buckets=st.integers(1, 1 << 20),
    device=st.sampled_from(["cpu", "cuda"]),
    tables=_tuples_of(
        st.builds(
            ExportedTable,
            group=_indices,
            family=_indices,
            rows=_bytes,
            num_blocks=_counts,
            block_size=_counts,
            num_heads=_counts,
            head_dim=_counts,
            item_size_bytes=_counts,
        )
    ),
    gpu_uuid=_texts,
    allocations=_tuples_of(
        st.builds(
            IpcAllocation,
            handle=st.binary(min_size=IPC_HANDLE_BYTES, max_size=IPC_HANDLE_BYTES),
            address=_addresses,
            nbytes=_counts,
        )
    ),
)

_inboxes = st.builds(
    m.ControlInbox,
    inbox_id=st.integers(1, (1 << 62) - 1),
    key=st.binary(min_size=32, max_size=32),
    max_message_bytes=st.integers(1024, (1 << 31) - 1),
)

MESSAGES: dict[type[m.Message], st.SearchStrategy[m.Message]] = {
    m.DirectoryRequest: st.builds(m.DirectoryRequest, engine_id=_ids),
    m.Directory: st.builds(m.Directory, geometry=_geometries(), workers=_tuples_of(_entries)),
    m.DirectoryRefused: st.builds(m.DirectoryRefused, refusal=_refusals, text=_texts),
    m.Hello: st.builds(
        m.Hello,
        geometry=_geometries(),
        pp_rank=_indices,
        tp_rank=_indices,
        incarnation=_ids,
        transport_address=_bytes,
        warm_up_tag=_tags,
        warm_up_bytes=_indices,
        library_version=_texts,
        control=st.none() | _inboxes,
        timeout_ms=_indices,
    ),
    m.HelloReply: st.builds(
        m.HelloReply,
        incarnation=_ids,
        refusal=st.none() | _refusals,
        text=_texts,
        transport_address=_bytes,
        max_chunk_bytes=_indices,
        export=st.none() | _exports,
        control=st.none() | _inboxes,
        timeout_ms=_indices,
    ),
    m.Read: st.builds(
        m.Read,
        transfer_id=_ids,
        secret=_secrets,
        read_id=_tags,
        incarnation=_ids,
        segments=_tuples_of(_segments),
        chunks=_bytes,
        blocks=_tuples_of(_blocks),
        window=st.integers(1, 1024),
        first_tag=_tags,
    ),
    m.ReadRefused: st.builds(m.ReadRefused, read_id=_tags, refusal=_refusals, text=_texts),
    m.ReadEnded: st.builds(
        m.ReadEnded, read_id=_tags, sent_chunks=_indices, refusal=_refusals, text=_texts
    ),
    m.CancelRead: st.builds(m.CancelRead, read_id=_tags),
    m.Done: st.builds(m.Done, transfer_id=_ids, secret=_secrets),
    m.Abort: st.builds(m.Abort, transfer_id=_ids, secret=_secrets),
    m.Heartbeat: st.builds(m.Heartbeat, transfers=_tuples_of(_keys), number=_indices),
    m.HeartbeatReply: st.builds(m.HeartbeatReply, number=_indices),
    m.Bye: st.builds(m.Bye, text=_texts),
}
"""Valid messages, by type: any values, of which only an engine's geometry makes sense as a whole."""


def messages() -> st.SearchStrategy[m.Message]:
    """Valid messages of all types."""
    return st.one_of(*MESSAGES.values())
