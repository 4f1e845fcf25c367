from __future__ import annotations

import struct
import tracemalloc

import msgspec
import pytest

from kvconnector.errors import IncompatiblePeerError, RemoteError, RemoteProtocolError
from kvconnector.wire import WIRE_MAJOR, decode, error_of
from kvconnector.wire import messages as m
from kvconnector.wire.codec import KINDS

SECRET = "0123456789abcdef" * 2
PART = {
    "name": "latent",
    "total_heads": 1,
    "head_start": 0,
    "head_stop": 1,
    "head_dim": 8,
    "item_size_bytes": 2,
}


def engine(*later, **changes):
    """An engine's geometry as it travels, with some fields changed, and with fields of later versions."""
    fields = {
        "engine_id": "e",
        "tp_size": 1,
        "pp_size": 1,
        "model": {"model": "m", "dtype": "d", "num_layers": 1},
        "holdings": [[{"block_size": 16, "layers": [0], "parts": [PART]}]],
        "ranks": [0],
        "verify": "none",
    }
    return [*(fields | changes).values(), *later]


def payload(message_type, *fields, major=WIRE_MAJOR):
    kind = next(kind for kind, known in KINDS.items() if known is message_type)
    return struct.pack("<4sHH", b"KVCN", major, kind) + msgspec.msgpack.encode(fields)


def read_fields(**changes):
    fields = {
        "transfer_id": "t",
        "secret": SECRET,
        "read_id": 1,
        "incarnation": "i",
        "segments": [[0, 0, 0, 1, 0, 1, "HND"]],
        "chunks": b"",
        "blocks": [],
        "window": 1,
        "first_tag": 0,
    }
    return (fields | changes).values()


def test_another_wire_major_is_told_from_garbage():
    with pytest.raises(IncompatiblePeerError, match="version") as refused:
        decode(payload(m.Bye, major=WIRE_MAJOR + 1))
    assert refused.value.context == {"ours": WIRE_MAJOR, "theirs": WIRE_MAJOR + 1}


@pytest.mark.parametrize(
    "data,complaint",
    [
        (b"", "shorter"),
        (b"GET / HTTP/1.1", "no kvconnector message"),
        (struct.pack("<4sHH", b"KVCN", WIRE_MAJOR, 999), "unknown message kind"),
    ],
)
def test_what_is_no_envelope_is_refused(data, complaint):
    with pytest.raises(RemoteProtocolError, match=complaint):
        decode(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"transfer_id": ""},
        {"transfer_id": "t" * 513},
        {"secret": SECRET[1:]},
        {"secret": SECRET + "0"},
        # hmac.compare_digest refuses to compare text beyond ASCII
        {"secret": "é" * 32},
        {"secret": SECRET[1:] + "\n"},
        {"read_id": -1},
        {"read_id": 1 << 62},
        {"window": 0},
        {"window": 1025},
        {"window": 1.0},
        {"first_tag": 1 << 62},
        {"segments": [[0, 0, 0, 1, 0, 1, "DHN"]]},
        {"segments": [[0, 0, 0, 1, 0, 1, "HND\n"]]},
        {"segments": [[0, 0, 0, 1 << 31, 0, 1, "HND"]]},
        {"blocks": [[-1, b""]]},
        {"blocks": [[0, "text"]]},
        {"chunks": "text"},
    ],
)
def test_a_read_with_a_value_out_of_range_is_refused(changes):
    assert isinstance(decode(payload(m.Read, *read_fields())), m.Read)
    with pytest.raises(RemoteProtocolError, match="malformed Read"):
        decode(payload(m.Read, *read_fields(**changes)))


def test_deep_nesting_is_refused():
    depth = 100_000
    # an appended field would be skipped, had it an end
    hostile = payload(m.HeartbeatReply)[:-1] + b"\x91" + b"\x91" * depth + b"\xc0"
    with pytest.raises(RemoteProtocolError, match="malformed HeartbeatReply"):
        decode(hostile)


@pytest.mark.parametrize("tp_size,pp_size", [(1 << 30, 1), (1, 1 << 30), (1 << 62, 1 << 62)])
def test_an_engine_that_claims_more_ranks_than_it_lists_is_refused_at_no_cost(tp_size, pp_size):
    hostile = payload(m.Directory, engine(tp_size=tp_size, pp_size=pp_size), [])
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="impossible Directory"):
            decode(hostile)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_impossible_geometry_is_refused_with_its_reason():
    assert isinstance(decode(payload(m.Directory, engine(), [])), m.Directory)
    group = {"block_size": 16, "layers": [0], "parts": [PART | {"head_stop": 2}]}
    with pytest.raises(RemoteProtocolError, match=r"impossible Directory.*head_stop"):
        decode(payload(m.Directory, engine(holdings=[[group]]), []))


def test_every_refusal_becomes_a_remote_error_with_its_text():
    made = [error_of(refusal, "because", request="r") for refusal in m.Refusal]
    assert all(isinstance(error, RemoteError) for error in made)
    assert {error.statement for error in made} == {"because [request='r']"}
    assert len({type(error) for error in made}) == len(m.Refusal)
