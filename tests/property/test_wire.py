"""Messages survive the wire, and `decode` answers any other bytes with one of two typed errors."""

import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.errors import IncompatiblePeerError, RemoteProtocolError
from kvconnector.wire import decode, encode
from kvconnector.wire import messages as m
from kvconnector.wire.codec import KINDS
from kvconnector.wire.packed_geometry import PackedGeometry
from kvconnector.wire.versions import SPOKEN, WireVersions
from tests.golden.test_wire_bytes import messages
from tests.support.strategies import engines, model_shapes

MESSAGES = st.sampled_from(list(messages().values()))
NUMBERS = {known: kind for kind, known in KINDS.items()}
ENVELOPE = struct.Struct("<4sHH")
# memory that a refusal may take, besides a small multiple of the message's length
MAX_OVERHEAD_BYTES = 256 << 10


def envelope(kind, body):
    return ENVELOPE.pack(b"KVCN", SPOKEN.newest, kind) + body


def check_harmless(payload):
    """Check that bytes decode to a message that survives the wire, or raise one of the two errors."""
    try:
        message = decode(payload)
    except (RemoteProtocolError, IncompatiblePeerError):
        return
    assert type(message) in KINDS.values()
    assert decode(encode(message)) == message


@given(model_shapes().flatmap(engines))
def test_geometries_survive_packing(engine):
    message = m.Directory(geometry=PackedGeometry.of(engine), workers=())
    received = decode(encode(message))
    assert received == message
    assert received.geometry.unpack() == engine
    for rank in engine.ranks:
        assert received.geometry.groups_of(rank.rank) == rank.groups


@given(MESSAGES, st.data())
def test_truncated_and_extended_messages_are_refused(message, data):
    payload = encode(message)
    step = len(payload) // 64 + 1
    for length in range(data.draw(st.integers(0, step - 1)), len(payload), step):
        with pytest.raises(RemoteProtocolError):
            decode(payload[:length])
    with pytest.raises(RemoteProtocolError):
        decode(payload + b"\xc0")


@given(message=MESSAGES, data=st.data())
def test_overwritten_bytes_are_refused_or_decode(message, data):
    payload = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    check_harmless(bytes(payload))


# values of every msgpack type, huge ones among them, nested at random
anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=10) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=25,
)


@given(message=MESSAGES, data=st.data())
def test_a_wrong_field_is_refused_or_decodes(message, data):
    fields = msgspec.msgpack.decode(encode(message)[ENVELOPE.size :])
    if fields:
        fields[data.draw(st.integers(0, len(fields) - 1))] = data.draw(anything)
    check_harmless(envelope(NUMBERS[type(message)], msgspec.msgpack.encode(fields)))


@given(message=MESSAGES, more=st.lists(anything, max_size=3))
def test_appended_fields_are_skipped(message, more):
    fields = msgspec.msgpack.decode(encode(message)[ENVELOPE.size :])
    assert (
        decode(envelope(NUMBERS[type(message)], msgspec.msgpack.encode([*fields, *more])))
        == message
    )


@given(message=MESSAGES, data=st.data())
def test_announced_lengths_allocate_nothing(message, data):
    """A header that announces four billion elements or bytes is inserted anywhere in a real message."""
    payload = encode(message)
    position = data.draw(st.integers(ENVELOPE.size, len(payload)))
    header = data.draw(st.sampled_from([b"\xc6", b"\xc9", b"\xdb", b"\xdd", b"\xdf"]))
    hostile = payload[:position] + header + b"\xff\xff\xff\xff" + payload[position:]
    tracemalloc.start()
    try:
        check_harmless(hostile)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MAX_OVERHEAD_BYTES + 64 * len(hostile)


RANGES = st.tuples(st.integers(1, 9), st.integers(0, 4)).map(lambda r: WireVersions(r[0], sum(r)))


@given(ours=RANGES, theirs=RANGES)
def test_engines_use_their_newest_common_version(ours, theirs):
    shared = {*range(ours.oldest, ours.newest + 1)} & {*range(theirs.oldest, theirs.newest + 1)}
    if shared:
        assert ours.common(theirs) == theirs.common(ours) == max(shared)
        assert ours.check(max(shared)) == max(shared)
        return
    with pytest.raises(IncompatiblePeerError, match="in common") as refused:
        ours.common(theirs)
    assert refused.value.context == {"ours": str(ours), "theirs": str(theirs)}
    with pytest.raises(IncompatiblePeerError, match="another wire version"):
        ours.check(theirs.newest)
