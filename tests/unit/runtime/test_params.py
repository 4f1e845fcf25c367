import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs, to_builtins

from kvconnector.config import ConnectorConfig
from kvconnector.errors import RemoteProtocolError
from kvconnector.layout import GroupBlocks
from kvconnector.runtime import TransferParams
from kvconnector.runtime.engine import joined_geometry
from kvconnector.runtime.params import MAX_SHARING, StreamRequest
from kvconnector.session.orders import HoldRequest
from tests.support.fakes import metadata_of

OFFER = TransferParams(
    remote_engine_id="p",
    remote_request_id="r",
    remote_block_ids=((1, 2), (3,)),
    remote_host="h",
    remote_port=5,
    remote_num_tokens=8,
    transfer_secret="0123456789abcdef" * 2,
)
PRODUCER = ConnectorConfig.from_mapping(
    {"engine_id": "d", "role": "producer", "control": {"insecure": True}}
)
# NixlConnector's keys, which routers know and llm-d's sidecar copies
NIXL_KEYS = {
    *("do_remote_prefill", "do_remote_decode", "remote_block_ids", "remote_engine_id"),
    *("remote_request_id", "remote_host", "remote_port", "remote_num_tokens", "tp_size", "pp_size"),
}


@pytest.mark.parametrize("name", ["r", "cmpl-1|2", "a|b|c|d"])
@pytest.mark.parametrize(
    "more", [{}, {"remote_first_blocks": (0, 7), "remote_public_key": "*-+/{}%$#" * 4}]
)
def test_a_router_that_passes_on_only_known_keys_loses_nothing(name, more):
    params = structs.replace(OFFER, remote_request_id=name, **more)
    sent = json.loads(json.dumps(params.to_mapping()))
    assert set(sent) == NIXL_KEYS
    assert TransferParams.from_mapping(sent) == params


def test_keys_of_their_own_are_read_as_well_and_go_first():
    params = to_builtins(structs.replace(OFFER, remote_first_blocks=(3, 0)))
    plain = TransferParams.from_mapping(params)
    assert (plain.remote_request_id, plain.transfer_secret) == ("r", OFFER.transfer_secret)
    folded = TransferParams.from_mapping({**params, "remote_request_id": f"r|{'6' * 32}||1"})
    assert folded == plain


@pytest.mark.parametrize("name", ["remote_engine_id", "remote_request_id", "remote_host"])
def test_text_that_no_message_can_carry_is_refused(name):
    params = json.loads(json.dumps(to_builtins(OFFER) | {name: "half a pair: \ud800"}))
    with pytest.raises(RemoteProtocolError, match="surrogates"):
        TransferParams.from_mapping(params)
    asked = {"do_remote_decode": True, "transfer_id": params[name], "transfer_secret": "5" * 32}
    with pytest.raises(RemoteProtocolError, match="surrogates"):
        StreamRequest.from_mapping(asked)


def test_a_first_block_of_thousands_of_digits_is_refused():
    params = OFFER.to_mapping() | {"remote_request_id": f"r|{'6' * 32}||{'1' * 5000}"}
    with pytest.raises(RemoteProtocolError, match="cannot be used"):
        TransferParams.from_mapping(params)


def test_a_list_that_groups_share_travels_once():
    """Twice as many numbers as groups: their first blocks, and then the list of each."""
    shared = structs.replace(OFFER, remote_first_blocks=(0, 0, 4, 0), remote_lists=(0, 0, 1, 0))
    sent = json.loads(json.dumps(shared.to_mapping()))
    assert set(sent) == NIXL_KEYS
    assert sent["remote_block_ids"] == [[1, 2], [3]]
    assert sent["remote_request_id"] == f"r|{OFFER.transfer_secret}||0,0,4,0,0,0,1,0"
    read = TransferParams.from_mapping(sent)
    assert read == shared
    assert (read.num_groups, [read.num_blocks(group) for group in range(4)]) == (4, [2, 2, 1, 2])
    found = [(blocks.first_block, blocks.block_ids.tolist()) for blocks in read.blocks()]
    assert found == [(0, [1, 2]), (0, [1, 2]), (4, [3]), (0, [1, 2])]


def test_an_earlier_build_sees_another_number_of_groups():
    """It compares the numbers with the lists, which differ in every offer that has shared ones."""
    for lists in ((0, 0), (0, 1, 0), (0, 1, 1, 0), (0, 0, 0, 0, 0)):
        sent = structs.replace(
            OFFER,
            remote_block_ids=tuple((each,) for each in range(max(lists) + 1)),
            remote_first_blocks=(0,) * len(lists),
            remote_lists=lists,
        ).to_mapping()
        numbers = sent["remote_request_id"].rpartition("|")[2].split(",")
        assert len(numbers) != len(sent["remote_block_ids"])


@pytest.mark.parametrize(
    "numbers, words",
    [
        ("0,0,0", "a different number of cache groups"),  # odd
        ("0,0,0,1", "a different number of cache groups"),  # no list would be shared
        ("0", "a different number of cache groups"),
        ("0,0,0,0,1,2", "do not match remote_block_ids"),
        ("0,0,0,0,0,0", "do not match remote_block_ids"),  # one list would be nobody's
        ("0,0,0,1,1,5", "do not match remote_block_ids"),
        ("0,0,0,0,1,4294967296", "cannot be used"),
        (",".join(["0"] * (MAX_SHARING + 1) * 2), "a different number of cache groups"),
    ],
)
def test_numbers_of_lists_that_are_not_there_are_refused(numbers, words):
    params = OFFER.to_mapping() | {"remote_request_id": f"r|{'6' * 32}||{numbers}"}
    with pytest.raises(RemoteProtocolError, match=words):
        TransferParams.from_mapping(params)


def test_lists_have_no_key_of_their_own():
    """A client's key of this name changes nothing."""
    params = OFFER.to_mapping() | {"remote_lists": [7, 7]}
    assert TransferParams.from_mapping(params) == OFFER


FIRST = st.integers(0, (1 << 31) - 1)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 3), max_size=2), st.integers(0, 2), FIRST),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
)
def test_what_each_group_has_arrives(groups, with_tables):
    """Groups share a list if, and only if, they have a table and its ids in common."""
    hold = HoldRequest(
        request_id="r",
        transfer_id="r",
        secret=OFFER.transfer_secret,
        blocks=tuple(GroupBlocks.of(ids, first) for ids, _, first in groups),
        num_tokens=8,
        lease_duration_s=1.0,
    )
    engine = joined_geometry(PRODUCER, metadata_of(role="producer"))
    tables = [table for _, table, _ in groups] if with_tables else ()
    made = TransferParams.of(hold, 8, engine, "tcp://h:5", "", tables=tables)
    sent = json.loads(json.dumps(made.to_mapping()))
    read = TransferParams.from_mapping(sent)
    assert read == made
    assert read.blocks() == hold.blocks
    once = {(table, tuple(ids)) for ids, table, _ in groups}
    assert len(sent["remote_block_ids"]) == (len(once) if with_tables else len(groups))


def test_very_many_groups_name_their_lists_apart():
    """The reader refuses more, so that a short text never stands for a long order."""
    for count, lists in ((MAX_SHARING, 1), (MAX_SHARING + 1, MAX_SHARING + 1)):
        hold = HoldRequest(
            request_id="r",
            transfer_id="r",
            secret=OFFER.transfer_secret,
            blocks=(GroupBlocks.of([1, 2]),) * count,
            num_tokens=8,
            lease_duration_s=1.0,
        )
        engine = joined_geometry(PRODUCER, metadata_of(role="producer"))
        made = TransferParams.of(hold, 8, engine, "tcp://h:5", "", tables=[0] * count)
        assert len(made.remote_block_ids) == lists
        assert TransferParams.from_mapping(made.to_mapping()).blocks() == hold.blocks
