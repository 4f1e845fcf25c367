import struct
import tracemalloc

import msgspec
import pytest
from msgspec.structs import replace

from kvconnector.errors import IncompatiblePeerError, RemoteError, RemoteProtocolError
from kvconnector.topology import (
    EngineGeometry,
    GroupGeometry,
    PartGeometry,
    RankGeometry,
    Segment,
)
from kvconnector.topology.segments import MAX_SEGMENTS
from kvconnector.wire import decode, decode_batch, encode, encode_batch, refusal_error, version_of
from kvconnector.wire import messages as m
from kvconnector.wire.export import IpcAllocation
from kvconnector.wire.packed_geometry import PackedGeometry
from kvconnector.wire.versions import SPOKEN
from tests.golden.test_wire_bytes import messages
from tests.support.fakes import FakeEngine, attention_model

ENVELOPE = struct.Struct("<4sHH")
READ = messages()["read"]
SECRET = READ.secret
DIRECTORY = m.Directory(
    geometry=PackedGeometry.of(FakeEngine("e", attention_model()).geometry()), workers=()
)


def travelling(message, **changes):
    """Return the bytes of a message with some fields changed, also those of its geometry."""
    payload = encode(message)
    fields = msgspec.msgpack.decode(payload[ENVELOPE.size :])
    places = {name: (fields, i) for i, name in enumerate(message.__struct_fields__)}
    if isinstance(message, m.Directory):
        names = enumerate(PackedGeometry.__struct_fields__)
        places |= {name: (fields[0], i) for i, name in names}
    for name, value in changes.items():
        holder, index = places[name]
        holder[index] = value
    return payload[: ENVELOPE.size] + msgspec.msgpack.encode(fields)


def test_a_rank_whose_holding_is_another_ones_takes_a_byte():
    latent = PartGeometry(
        name="latent", total_heads=1, head_start=0, head_stop=1, head_dim=576, item_size_bytes=2
    )
    holding = (GroupGeometry(block_size=64, layers=tuple(range(61)), parts=(latent,)),)
    one = {"engine_id": "e", "pp_size": 1, "model": DIRECTORY.geometry.model}
    sizes = []
    for count in (100, 1100):
        ranks = tuple(RankGeometry(pp_rank=0, tp_rank=n, groups=holding) for n in range(count))
        engine = EngineGeometry(**one, tp_size=count, ranks=ranks)
        sizes.append(len(encode(replace(DIRECTORY, geometry=PackedGeometry.of(engine)))))
    assert 1000 <= sizes[1] - sizes[0] <= 1010  # and a few bytes for the counts


@pytest.mark.parametrize("other", [SPOKEN.newest + 1, SPOKEN.oldest - 1])
def test_another_wire_version_is_incompatible(other):
    with pytest.raises(IncompatiblePeerError, match="version") as refused:
        decode(ENVELOPE.pack(b"KVCN", other, 2))
    assert refused.value.context == {"ours": str(SPOKEN), "theirs": other}


@pytest.mark.parametrize("character", "\r\n\0\x1b\x7f\x85\u2028")
@pytest.mark.parametrize(
    "name, field",
    [
        ("directory_request", "engine_id"),
        ("directory_refused", "text"),
        ("directory", "engine_id"),
        ("read", "transfer_id"),
        ("bye", "text"),
    ],
)
def test_control_characters_are_refused(name, field, character):
    message = DIRECTORY if name == "directory" else messages()[name]
    assert decode(travelling(message, **{field: "é 漢"}))
    for text in (f"{character}", f"a{character}b", f"a{character}"):
        with pytest.raises(RemoteProtocolError, match=r"[Mm]alformed"):
            decode(travelling(message, **{field: text}))


class EarlierModel(msgspec.Struct, frozen=True, kw_only=True):
    """`ModelDescription` of releases that state no values of a configuration."""

    model: str
    dtype: str
    num_layers: int
    quantization: str = ""


def test_values_of_a_model_are_skipped_and_missed_by_earlier_releases():
    model = DIRECTORY.geometry.model
    stated = replace(
        model,
        position_encodings=(("", "default(rope_theta=10000)"),),
        revision="m@main",
        config=(("rms_norm_eps", "1e-06"),),
    )
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(stated), type=EarlierModel)
    assert msgspec.structs.asdict(read).items() <= msgspec.structs.asdict(model).items()
    earlier = msgspec.msgpack.decode(msgspec.msgpack.encode(read))
    assert decode(travelling(DIRECTORY, model=earlier)).geometry.model == model


@pytest.mark.parametrize(
    "wrong",
    [
        {"position_encodings": [["", "x" * 2049]]},
        {"position_encodings": "default"},
        {"revision": "org/m@main\r\n"},
        {"config": [["a", "b", "c"]]},
        {"config": [["a", "\x1b[2J"]]},
        {"config": [["a", "b"]] * 65},
    ],
)
def test_impossible_values_of_a_model_are_refused(wrong):
    model = msgspec.to_builtins(DIRECTORY.geometry.model)
    assert decode(travelling(DIRECTORY, model=model)) == DIRECTORY
    with pytest.raises(RemoteProtocolError, match="malformed"):
        decode(travelling(DIRECTORY, model=model | wrong))


@pytest.mark.parametrize("name", ["directory_request", "directory_refused", "bye"])
def test_messages_before_agreement_decode_in_any_version(name):
    message = messages()[name]
    assert decode(encode(message, 77)) == message


@pytest.mark.parametrize(
    "data,complaint",
    [
        (b"", "shorter"),
        (b"GET / HTTP/1.1", "not a kvconnector message"),
        (ENVELOPE.pack(b"KVCN", SPOKEN.newest, 999), "unknown message kind"),
    ],
)
def test_wrong_envelopes_are_refused(data, complaint):
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
        {"secret": SECRET + "\n"},
        {"read_id": -1},
        {"read_id": 1 << 62},
        {"window": 0},
        {"window": 1025},
        {"window": 1.0},
        {"first_tag": 1 << 62},
        {"token_ranges": [[-1, 2]]},
        {"token_ranges": [[0, 1 << 31]]},
        {"token_ranges": [[0, 1, 2]]},
        {"layers": [0]},
        {"chunk_bytes": -1},
        {"blocks": [[-1, b""]]},
        {"blocks": [[0, "text"]]},
    ],
)
def test_reads_out_of_range_are_refused(changes):
    assert decode(travelling(READ)) == READ
    with pytest.raises(RemoteProtocolError, match=r"(malformed|impossible) Read"):
        decode(travelling(READ, **changes))


@pytest.mark.parametrize(
    "wrong",
    [
        {"order": "DHN"},
        {"order": "HND\n"},
        {"layers": [1 << 31]},
        {"layers": []},
        {"stripe": [0, 0, 1]},
        {"stripe": [2, 7, 8]},
        {"stripe": [0, 1 << 31, 1 << 31]},
    ],
)
def test_impossible_segments_are_refused(wrong):
    hello = messages()["hello_with_segments"]
    fields = dict(
        zip(Segment.__struct_fields__, msgspec.to_builtins(hello.segments[0]), strict=True)
    )
    with pytest.raises(RemoteProtocolError, match=r"(malformed|impossible) Hello"):
        decode(travelling(hello, segments=[list((fields | wrong).values())]))


def test_too_many_segments_are_refused():
    hello = messages()["hello_with_segments"]
    segment = msgspec.to_builtins(hello.segments[0])
    assert (
        len(decode(travelling(hello, segments=[segment] * MAX_SEGMENTS)).segments) == MAX_SEGMENTS
    )
    with pytest.raises(RemoteProtocolError, match="malformed Hello"):
        decode(travelling(hello, segments=[segment] * (MAX_SEGMENTS + 1)))


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1a"], ids=["lists", "maps"])
def test_deep_nesting_is_refused(nested):
    """Of a field that a later release appended, and that is skipped here."""
    head = encode(m.HeartbeatReply())[: ENVELOPE.size] + b"\x92\x07"
    assert decode(head + nested * 10 + b"\xc0") == m.HeartbeatReply(number=7)
    with pytest.raises(RemoteProtocolError, match="malformed HeartbeatReply"):
        decode(head + nested * 100_000 + b"\xc0")


@pytest.mark.parametrize("tp_size,pp_size", [(1 << 30, 1), (1, 1 << 30), (1 << 62, 1 << 62)])
def test_a_claimed_number_of_ranks_allocates_nothing(tp_size, pp_size):
    hostile = travelling(DIRECTORY, tp_size=tp_size, pp_size=pp_size)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="impossible Directory"):
            decode(hostile)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": [1]},
        {"ranks": [-1]},
        {"ranks": [0, 0]},
        {"ranks": []},
        {"tp_size": 0, "ranks": []},
        {"tp_size": 2},
    ],
)
def test_an_engine_names_a_holding_of_each_rank(changes):
    with pytest.raises(RemoteProtocolError, match=r"impossible Directory.*each of its ranks"):
        decode(travelling(DIRECTORY, **changes))


def test_an_impossible_geometry_is_refused_with_the_reason():
    assert decode(travelling(DIRECTORY)) == DIRECTORY
    holdings = msgspec.to_builtins(DIRECTORY.geometry.holdings)
    holdings[0][0]["parts"][0]["head_stop"] = 3
    with pytest.raises(RemoteProtocolError, match=r"impossible Directory.*head_stop"):
        decode(travelling(DIRECTORY, holdings=holdings))


def test_every_refusal_becomes_a_remote_error():
    made = [refusal_error(refusal, "because", request="r") for refusal in m.Refusal]
    assert all(isinstance(error, RemoteError) for error in made)
    assert {error.statement for error in made} == {"because [request='r']"}
    assert len({type(error) for error in made}) == len(m.Refusal)


def test_nested_and_broken_batches_are_refused():
    done = encode(m.HeartbeatReply(number=1))
    assert encode_batch([done]) == done
    assert decode_batch(done) == (m.HeartbeatReply(number=1),)
    assert decode_batch(encode_batch([done, done])) == (m.HeartbeatReply(number=1),) * 2
    for inner in (encode_batch([done, done]), b"", done[:-1]):
        with pytest.raises(RemoteProtocolError):
            decode_batch(encode(m.Batch(messages=(done, inner))))
    for count in (0, m.MAX_BATCH_MESSAGES + 1):
        with pytest.raises(RemoteProtocolError, match="malformed Batch"):
            decode(encode(m.Batch(messages=(done,) * count)))


def test_a_peer_is_answered_in_its_version_if_it_is_spoken_here():
    for version in range(SPOKEN.oldest, SPOKEN.newest + 1):
        assert version_of(encode(m.Bye(), version)) == version
    for other in (encode(m.Bye(), SPOKEN.newest + 1), encode(m.Bye(), 0), b"", b"KVCN\x04"):
        assert version_of(other) == SPOKEN.oldest


def test_greetings_state_timeouts_and_the_shorter_one_counts():
    stated = [m.stated_timeout_ms(seconds) for seconds in (1e-6, 0.25, 1e6)]
    assert stated == [1, 250, 10**9]  # 0 would mean that none is stated
    assert decode(encode(m.HelloReply(incarnation="i", timeout_ms=stated[-1])))
    found = [m.shorter_timeout_s(3.0, theirs_ms) for theirs_ms in (0, 2500, 4000)]
    assert found == [3.0, 2.5, 3.0]


FOLLOW = m.Follow(transfer_id="t", secret=SECRET)
PROBE = m.Probe(first_tag=1, nbytes=1, count=1)
REPLY = messages()["hello_reply_with_export"]
ALLOCATION = IpcAllocation(handle=bytes(64), address=1, nbytes=1)


def exporting(**changes):
    return replace(REPLY, export=replace(REPLY.export, **changes))


@pytest.mark.parametrize(
    "right, wrong",
    [
        (replace(PROBE, count=64), replace(PROBE, count=65)),
        (PROBE, replace(PROBE, count=0)),
        (
            m.Progress(transfer_id="t", extra=bytes(256)),
            m.Progress(transfer_id="t", extra=bytes(257)),
        ),
        (
            m.Heartbeat(transfers=(), followed=(FOLLOW,) * m.MAX_NAMED),
            m.Heartbeat(transfers=(), followed=(FOLLOW,) * (m.MAX_NAMED + 1)),
        ),
        (exporting(nonce=bytes(16)), exporting(nonce=bytes(15))),
        (exporting(num_buckets=1 << 20), exporting(num_buckets=(1 << 20) + 1)),
        (exporting(device="cuda"), exporting(device="tpu")),
        (
            exporting(allocations=(ALLOCATION,)),
            exporting(allocations=(replace(ALLOCATION, handle=bytes(63)),)),
        ),
    ],
)
def test_values_beyond_their_bounds_are_refused(right, wrong):
    assert decode(encode(right)) == right
    with pytest.raises(RemoteProtocolError, match="malformed"):
        decode(encode(wrong))


def test_heartbeats_of_too_many_names_are_refused():
    keys = tuple(m.TransferKey(transfer_id=f"t{i}", secret=SECRET) for i in range(m.MAX_NAMED + 1))
    assert decode(encode(m.Heartbeat(transfers=keys[1:])))
    with pytest.raises(RemoteProtocolError, match="malformed Heartbeat"):
        decode(encode(m.Heartbeat(transfers=keys)))
