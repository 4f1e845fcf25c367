"""The bytes of wire major 1, one file a message kind. They are what released peers send: never change a file here.

A field that is appended to a message changes what `encode` writes, not what `decode` takes: add a file of the new bytes
beside the old one, under another name, keep the old one in `DECODES_AS`, and name it in `SENT_BY_EARLIER_MINORS`.
"""

from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from kvconnector.planning import CHUNK_DTYPE
from kvconnector.topology import ModelDescription
from kvconnector.wire import decode, encode
from kvconnector.wire import messages as m
from kvconnector.wire.codec import KINDS
from kvconnector.wire.export import ExportedTable, IpcAllocation, PoolExport
from kvconnector.wire.packed_geometry import PackedGeometry
from tests.support.fakes import FakeGroup, FakeModel, FakePart, cut_engine

FOLDER = Path(__file__).parent / "wire_1"
SECRET = "00112233445566778899aabbccddeeff"
INCARNATION = "ffeeddccbbaa99887766554433221100"


LATENT = FakePart("latent", 1, 576, 1)
MODEL = ModelDescription(model="org/model", dtype="bfloat16", num_layers=3, quantization="fp8_e4m3")
GEOMETRY = replace(
    cut_engine(
        FakeModel(
            3,
            (
                FakeGroup((0, 2), (FakePart("k", 8, 192), FakePart("v", 8, 128))),
                FakeGroup((1,), (LATENT,)),
            ),
        ),
        engine_id="prefill-0",
        stages=[range(3)],
        block_sizes=[16, 64],
        tp_size=2,
    ),
    model=MODEL,
)
SHARED_TOKENS = replace(
    cut_engine(
        FakeModel(3, (FakeGroup((0, 1, 2), (LATENT,)),)),
        engine_id="decode-0",
        stages=[range(3)],
        block_sizes=[64],
        tp_size=2,
        dcp=[(2, 16)],
    ),
    model=MODEL,
)
INBOX = m.ControlInbox(inbox_id=(1 << 62) - 5, key=bytes(range(32)), max_message_bytes=16 << 20)
KEYS = tuple(m.TransferKey(transfer_id=f"request-{n}", secret=SECRET) for n in (1, 2))
HELLO = m.Hello(
    geometry=PackedGeometry.of(GEOMETRY),
    pp_rank=0,
    tp_rank=1,
    incarnation=INCARNATION,
    transport_address=bytes(range(16)),
    warm_up_tag=1 << 61,
    warm_up_bytes=65536,
    library_version="0.1.0",
)
HELLO_REPLY = m.HelloReply(
    incarnation=INCARNATION, transport_address=bytes(range(16)), max_chunk_bytes=32 << 20
)
READ = m.Read(
    transfer_id="request-1",
    secret=SECRET,
    read_id=7,
    incarnation=INCARNATION,
    segments=(
        m.ReadSegment(
            group=0,
            family=1,
            first_layer=2,
            num_layers=1,
            head_start=4,
            head_stop=6,
            order="NHD",
        ),
    ),
    chunks=np.array([(0, 0, 2, 5, 27), (0, 2, 1, 32, 300)], dtype=CHUNK_DTYPE).tobytes(),
    blocks=(
        m.ReadBlocks(first_block=0, block_ids=np.array([3, 1], dtype="<i4").tobytes()),
        m.ReadBlocks(first_block=2, block_ids=np.array([1 << 30], dtype="<i4").tobytes()),
    ),
    window=4,
    first_tag=7 << 20,
)
DECODES_AS = {
    "directory_request": m.DirectoryRequest(engine_id="prefill-0"),
    "directory_request_for_any": m.DirectoryRequest(engine_id="doctor", any_engine=True),
    "directory_request_of_ranks": m.DirectoryRequest(
        engine_id="prefill-0", ranks=(3, 1023), world_size=1024
    ),
    "directory": m.Directory(
        geometry=PackedGeometry.of(GEOMETRY),
        workers=tuple(
            m.WorkerEntry(
                pp_rank=0,
                tp_rank=tp_rank,
                control_address=f"tcp://192.0.2.{tp_rank + 1}:5600",
                public_key="rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7",
                incarnation=INCARNATION,
            )
            for tp_rank in range(2)
        ),
    ),
    "directory_with_version": m.Directory(
        geometry=PackedGeometry.of(replace(SHARED_TOKENS, verify="checksum")),
        workers=(),
        library_version="0.1.0",
        stream=False,
    ),
    "directory_refused": m.DirectoryRefused(
        refusal=m.Refusal.INCOMPATIBLE, text="engine 'a' is here, not 'b'"
    ),
    "hello": HELLO,
    "hello_with_control": replace(HELLO, control=INBOX),
    "hello_with_timeout": replace(HELLO, control=INBOX, timeout_ms=15_000),
    "hello_dcp": replace(HELLO, geometry=PackedGeometry.of(SHARED_TOKENS)),
    "hello_reply": m.HelloReply(
        incarnation=INCARNATION, refusal=m.Refusal.STALE_INCARNATION, text="restarted"
    ),
    "hello_reply_with_export": replace(
        HELLO_REPLY,
        export=PoolExport(
            pid=4242,
            nonce_address=0x7F00_0000_1000,
            nonce=bytes(range(16)),
            board_address=0x7F00_0000_2000,
            num_buckets=512,
            device="cuda",
            tables=(
                ExportedTable(
                    group=0,
                    family=1,
                    rows=np.array([[1 << 40, 65536, 4096, 256, 2]], dtype="<i8").tobytes(),
                    num_blocks=1024,
                    block_size=16,
                    num_heads=4,
                    head_dim=128,
                    item_size_bytes=2,
                ),
            ),
            gpu_uuid="00112233-4455-6677-8899-aabbccddeeff",
            allocations=(IpcAllocation(handle=bytes(64), address=1 << 40, nbytes=64 << 20),),
        ),
    ),
    "hello_reply_with_control": replace(HELLO_REPLY, control=INBOX),
    "hello_reply_with_timeout": replace(HELLO_REPLY, control=INBOX, timeout_ms=15_000),
    "read": READ,
    "read_of_a_stripe": replace(
        READ,
        read_id=8,
        segments=(
            m.ReadSegment(
                group=0,
                family=0,
                first_layer=0,
                num_layers=2,
                head_start=0,
                head_stop=1,
                order="HND",
                token_first=16,
                token_run=8,
                token_period=64,
            ),
        ),
        chunks=np.array([(0, 0, 4, 3, 40)], dtype=CHUNK_DTYPE).tobytes(),
        blocks=(m.ReadBlocks(first_block=0, block_ids=np.arange(5, dtype="<i4").tobytes()),),
        window=2,
        first_tag=8 << 20,
    ),
    "read_refused": m.ReadRefused(read_id=7, refusal=m.Refusal.LEASE_EXPIRED, text="too late"),
    "read_ended": m.ReadEnded(
        read_id=7, sent_chunks=3, refusal=m.Refusal.ABORTED, text="cancelled"
    ),
    "cancel_read": m.CancelRead(read_id=7),
    "done": m.Done(transfer_id="request-1", secret=SECRET),
    "abort": m.Abort(transfer_id="request-1", secret=SECRET),
    "follow": m.Follow(transfer_id="request-1", secret=SECRET),
    "progress": m.Progress(
        transfer_id="request-1",
        num_tokens=2048,
        blocks=(
            m.ReadBlocks(first_block=0, block_ids=np.arange(3, dtype="<i4").tobytes()),
            m.ReadBlocks(first_block=7, block_ids=b""),
        ),
        is_complete=True,
    ),
    "progress_refused": m.Progress(
        transfer_id="request-1", refusal=m.Refusal.ABORTED, text="the request was aborted"
    ),
    "progress_with_layers": m.Progress(
        transfer_id="request-1", num_tokens=2048, ahead_tokens=4096, ahead_layers=12
    ),
    "heartbeat": m.Heartbeat(transfers=KEYS),
    "heartbeat_with_number": m.Heartbeat(transfers=KEYS[:1], number=3),
    "heartbeat_that_maps": m.Heartbeat(transfers=KEYS[:1], number=3, maps_pools=True),
    "probe": m.Probe(first_tag=1 << 40, nbytes=1 << 20, count=32),
    "heartbeat_reply": m.HeartbeatReply(),
    "heartbeat_reply_with_number": m.HeartbeatReply(number=3),
    "bye": m.Bye(text="the worker is closing"),
}
SENT_BY_EARLIER_MINORS = {
    "directory",
    "directory_request",
    "directory_request_for_any",
    "heartbeat",
    "heartbeat_with_number",
    "heartbeat_reply",
    "hello",
    "hello_dcp",
    "hello_with_control",
    "hello_reply",
    "hello_reply_with_control",
    "hello_reply_with_export",
    "progress",
    "progress_refused",
    "read",
}


def golden(name):
    return bytes.fromhex((FOLDER / f"{name}.hex").read_text())


@pytest.mark.parametrize("name", DECODES_AS)
def test_bytes_of_a_released_peer_still_decode(name):
    assert decode(golden(name)) == DECODES_AS[name]


@pytest.mark.parametrize("name", sorted(set(DECODES_AS) - SENT_BY_EARLIER_MINORS))
def test_we_still_send_the_bytes_that_released_peers_know(name):
    assert encode(DECODES_AS[name]).hex() == golden(name).hex()


def test_every_kind_and_every_file_is_covered():
    assert {type(message) for message in DECODES_AS.values()} == set(KINDS.values())
    assert {path.stem for path in FOLDER.iterdir()} == set(DECODES_AS)
