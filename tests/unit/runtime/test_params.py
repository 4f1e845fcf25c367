import json

import pytest
from msgspec import structs, to_builtins

from kvconnector.errors import RemoteProtocolError
from kvconnector.runtime import TransferParams
from kvconnector.runtime.params import StreamRequest

OFFER = TransferParams(
    remote_engine_id="p",
    remote_request_id="r",
    remote_block_ids=((1, 2), (3,)),
    remote_host="h",
    remote_port=5,
    remote_num_tokens=8,
    transfer_secret="0123456789abcdef" * 2,
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
