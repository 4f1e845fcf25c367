"""Keys of a peer's memory: what may reach UCX, which parses them unchecked, and over which lanes they serve."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvconnector.config import ConnectorConfig
from kvconnector.errors import RemoteProtocolError
from kvconnector.runtime.channels import open_transport
from kvconnector.transport.ucx import UcxTransport, open_ucx_transport
from kvconnector.transport.ucx.rma import MAX_KEY_BYTES, Rma, check_key, reads_memory

pytestmark = pytest.mark.ucx


def key_of(*domains: bytes, kind: int = 0, num_domains: int | None = None) -> bytes:
    count = len(domains) if num_domains is None else num_domains
    head = ((1 << count) - 1).to_bytes(8, "little") + bytes([kind])
    return head + b"".join(bytes([len(domain)]) + domain for domain in domains)


REFUSED = {
    "short": bytes(8),
    "long": bytes(MAX_KEY_BYTES + 1),
    "of a GPU": key_of(kind=2),
    "of an unknown kind of memory": key_of(kind=163),
    "without its domain": key_of(num_domains=1),
    "with one domain of 64": key_of(b"abc", num_domains=64),
    "without its last byte": key_of(b"abcd")[:-1],
}


@pytest.fixture(scope="module")
def transport() -> Iterator[UcxTransport]:
    opened = open_ucx_transport(one_sided=True, options={"TLS": "tcp"})
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def handle(transport: UcxTransport) -> int:
    """An endpoint from the worker to itself."""
    return transport.endpoint_handle(transport.connect(transport.address))


@pytest.fixture(scope="module")
def rma(transport: UcxTransport) -> Rma:
    assert transport.rma is not None
    return transport.rma


@pytest.mark.parametrize("case", REFUSED)
def test_keys_that_are_none_never_reach_ucx(rma: Rma, handle: int, case: str) -> None:
    with pytest.raises(RemoteProtocolError, match="memory key"):
        rma.unpack(handle, REFUSED[case])


@given(key=st.binary(max_size=64))
def test_what_is_accepted_holds_all_that_ucx_looks_for(key: bytes) -> None:
    try:
        check_key(key)
    except RemoteProtocolError:
        return
    at = 9
    for _ in range(key[:8].hex().translate(_BITS).count("1")):
        at += 1 + key[at]  # an IndexError is a length outside the key
    assert at <= len(key)


_BITS = {ord(f"{digit:x}"): f"{digit:04b}" for digit in range(16)}


@pytest.mark.parametrize("num_behind", [0, 7])
def test_domains_that_are_unknown_here_are_passed_over(
    rma: Rma, handle: int, num_behind: int
) -> None:
    key = (3 << 60).to_bytes(8, "little") + bytes([0, 2]) + b"ab" + bytes([1]) + b"c"
    rma.destroy(rma.unpack(handle, key + bytes([0xA5] * num_behind)))


def test_registered_memory_has_a_key_that_peers_accept(rma: Rma, handle: int) -> None:
    memory = (ctypes.c_char * 8192)()
    region = rma.register(ctypes.addressof(memory), 8192)
    try:
        check_key(region.key)
        rma.destroy(rma.unpack(handle, region.key))
    finally:
        rma.unregister(region)


def test_a_transport_is_not_one_sided_unless_it_is_asked_for() -> None:
    plain = open_ucx_transport(options={"TLS": "tcp"})
    assert plain.rma is None
    plain.close()


@pytest.mark.parametrize(
    "lanes, keys, is_read",
    [
        ("rc_mlx5/mlx5_0:1+tcp/eth0", [key_of(b"rkey")], True),
        ("rc_mlx5/mlx5_0:1", [key_of(b"rkey"), key_of()], False),
        ("tcp/eth0", [key_of(b"rkey")], False),
        ("sysv/memory+cma/memory", [key_of()], False),
        ("dc_mlx5/mlx5_0:1", [b""], False),
    ],
)
def test_only_hardware_that_reads_is_used(lanes: str, keys: list[bytes], is_read: bool) -> None:
    assert reads_memory(lanes, keys) is is_read


@pytest.mark.parametrize(
    "settings, is_one_sided",
    [
        ({}, False),
        ({"paths": {"one_sided": "auto"}}, True),
        ({"paths": {"one_sided": "always"}, "staging": {"pump": False}}, False),
    ],
    ids=["by default", "on request", "without the pump"],
)
def test_a_worker_opens_its_memory_on_request_only(
    settings: dict[str, dict[str, object]], is_one_sided: bool
) -> None:
    config = ConnectorConfig.from_mapping(
        {"engine_id": "e", "control": {"insecure": True}, **settings}
    )
    opened = open_transport(config)
    assert isinstance(opened, UcxTransport)
    assert (opened.rma is not None) == is_one_sided
    opened.close()
