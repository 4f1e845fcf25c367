"""RDMA between hosts, on made-up trees of sysfs: which ports there are, and what is logged if UCX takes TCP."""

import ctypes
import logging
import os
import re
import struct
import zlib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from msgspec.structs import replace

from kvconnector.errors import ConfigError, IncompatiblePeerError, RemoteProtocolError
from kvconnector.transport.ucx import UcxTransport, load_library, open_ucx_transport, ports
from kvconnector.transport.ucx.address import HOST_ID_BYTES, WorkerAddress
from kvconnector.transport.ucx.library import path_of
from kvconnector.transport.ucx.ports import active_rdma_ports, distance, place_of
from kvconnector.transport.ucx.rdma import LOCKED_BYTES_PER_DEVICE, RdmaChoice


class Sysfs:
    """A made-up /sys. Devices are added by their path of PCI addresses, the root complex first."""

    def __init__(self, root):
        self.root = root

    def pci(self, path, node):
        folder = self.root / "devices" / path
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(f"{node}\n")
        known = self.root / "bus/pci/devices"
        known.mkdir(parents=True, exist_ok=True)
        (known / folder.name).symlink_to(os.path.relpath(folder, known))
        return folder

    def port(self, device, folder, state="4: ACTIVE"):
        port = self.root / "class/infiniband" / device / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        if folder is not None:
            (port.parents[1] / "device").symlink_to(folder)

    def cpus(self, node, *cpus):
        for cpu in cpus:
            (self.root / f"devices/system/cpu/cpu{cpu}/node{node}").mkdir(parents=True)


@pytest.fixture
def sysfs(tmp_path, monkeypatch):
    monkeypatch.setattr(ports, "SYSFS", tmp_path)
    monkeypatch.setattr(ports, "_pci_address", lambda index: f"0000:{index:x}3:00.0")
    return Sysfs(tmp_path)


@pytest.mark.parametrize(
    "path, node, words",
    [
        ("pci0000:00/0000:00:01.0/0000:01:00.0/0000:02:01.0", 0, "one PCIe bridge, 2 links"),
        ("pci0000:00/0000:00:02.0", 0, "one PCIe root complex"),
        ("pci0000:80/0000:80:01.0", 0, "one NUMA node"),
        ("pci0000:80/0000:80:01.0", 1, "another NUMA node"),
        ("pci0000:80/0000:80:01.0", -1, "does not name"),
    ],
)
def test_the_distance_from_a_port_to_a_gpu_is_worded(sysfs, path, node, words):
    sysfs.pci("pci0000:00/0000:00:01.0/0000:01:00.0/0000:03:00.0", 0)
    sysfs.port("mlx5_0", sysfs.pci(path, node))
    (port,) = active_rdma_ports().values()
    assert words in distance(port, place_of("cuda:0"))


@pytest.mark.parametrize("cpus, nodes", [([0], {0}), ([2], {1}), ([0, 2], {0, 1})])
def test_a_process_without_a_gpu_is_on_the_numa_nodes_of_its_cpus(sysfs, monkeypatch, cpus, nodes):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cpus)
    for node in (0, 1):
        sysfs.cpus(node, 2 * node, 2 * node + 1)
    assert place_of("cpu").nodes == nodes


def test_ports_without_a_link_or_a_place(sysfs):
    sysfs.port("mlx5_0", sysfs.pci("pci0000:00/0000:00:02.0", 0), "1: DOWN")
    assert active_rdma_ports() == {}
    sysfs.port("rxe0", None)
    assert active_rdma_ports()["rxe0:1"].path == ()


@pytest.mark.gpu
def test_a_gpu_of_this_host_is_found_on_its_bus():
    place = place_of("cuda:0")
    assert place.path[0].startswith("pci")


RDMA = {("rc_mlx5", "mlx5_0:1"), ("ud_mlx5", "mlx5_1:1")}
TCP = {("tcp", "eth0"), ("tcp", "lo"), ("sysv", "memory")}


def offering(*resources):
    """A UCX that has these transports unless an option leaves them out."""

    def offers(options):
        devices, tls = options.get("NET_DEVICES", "all"), options.get("TLS", "all")
        found = {each for some in resources for each in some}
        found = {each for each in found if devices == "all" or each[1] in devices.split(",")}
        return {each for each in found if tls == "all" or each[0] in tls.split(",")}

    return offers


def choice(offers, path="/libucp.so.0", **settings):
    """Return the choice among the devices that a made-up UCX offers."""
    return RdmaChoice(SimpleNamespace(path=Path(path)), offers=offers, **settings)


@pytest.fixture
def two_ports(sysfs):
    """RDMA ports, the first of which is near to every CPU."""
    for node in (0, 1):
        sysfs.port(f"mlx5_{node}", sysfs.pci(f"pci0000:{node}0/0000:{node}0:01.0", node))
    sysfs.cpus(0, *range(os.cpu_count() or 1))
    return sysfs.root


@pytest.mark.parametrize("named", ["", "all", "mlx5_1,eth0", "mlx5_1:1"])
def test_devices_that_ucx_can_use_may_be_named(named):
    choice(offering(RDMA, TCP)).check_devices({"TLS": "all", "NET_DEVICES": named})


def test_a_device_that_ucx_cannot_use_is_named_beside_those_it_can():
    with pytest.raises(ConfigError, match=r"eth77.*usable=\[.*'lo'") as raised:
        open_ucx_transport(options={"NET_DEVICES": "lo,eth77"})
    assert raised.value.context["named"] == ["eth77"]


@pytest.fixture
def lock_limit(monkeypatch):
    """Bounds the memory that this process may lock; None: no limit."""

    def limit(nbytes):
        monkeypatch.setattr("kvconnector.transport.ucx.rdma.lockable_bytes", lambda: nbytes)

    return limit


@pytest.mark.parametrize(
    "limit, options, taken",
    [
        (None, {}, None),
        (2 * LOCKED_BYTES_PER_DEVICE, {}, None),
        (2 * LOCKED_BYTES_PER_DEVICE - 1, {}, "eth0,lo"),
        (LOCKED_BYTES_PER_DEVICE, {"NET_DEVICES": "mlx5_1:1,lo"}, "mlx5_1:1,lo"),
        (LOCKED_BYTES_PER_DEVICE - 1, {"NET_DEVICES": "mlx5_1:1,lo"}, "lo"),
        (0, {"NET_DEVICES": "eth0"}, "eth0"),
    ],
)
def test_rdma_is_left_out_where_its_receive_queues_cannot_be_locked(
    lock_limit, caplog, limit, options, taken
):
    lock_limit(limit)
    with caplog.at_level(logging.WARNING):
        settled = choice(offering(RDMA, TCP)).without_unlockable(options, require_rdma=False)
    assert settled.pop("NET_DEVICES", None) == taken
    assert not settled
    is_changed = taken != options.get("NET_DEVICES")
    assert len(caplog.records) == is_changed
    if is_changed:
        assert f"may lock {limit} bytes" in caplog.text
        assert "set `ulimit -l unlimited`" in caplog.text
        assert "capabilities.add: [IPC_LOCK]" in caplog.text


@pytest.mark.parametrize("options, require_rdma", [({}, True), ({"TLS": "rc_mlx5"}, False)])
def test_rdma_that_cannot_be_left_out_and_cannot_lock_memory_ends_the_start(
    lock_limit, options, require_rdma
):
    lock_limit(8 << 20)
    with pytest.raises(ConfigError, match=r"may lock 8388608 bytes.*ulimit -l unlimited"):
        choice(offering(RDMA, TCP)).without_unlockable(options, require_rdma=require_rdma)


@pytest.mark.parametrize("device, counts", [("cpu", True), ("cuda:0", False)])
def test_staging_memory_of_the_host_is_locked_too(lock_limit, device, counts):
    lock_limit(2 * LOCKED_BYTES_PER_DEVICE + 7)
    some = choice(offering(RDMA, TCP), device=device, staging_bytes=8)
    assert bool(some.lack_of_memory({"mlx5_0:1", "mlx5_1:1"})) == counts
    assert not some.lack_of_memory(set())


@pytest.mark.parametrize(
    "options, offers, remedy",
    [
        ({"NET_DEVICES": "lo"}, offering(RDMA, TCP), "may lock 8388608 bytes .*mlx5_1:1"),
        ({}, offering(RDMA, TCP), "the peer has none that this host reaches"),
        ({"NET_DEVICES": "eth0"}, offering(RDMA, TCP), r"ucx\.net_devices=eth0 leaves out"),
        ({"TLS": "tcp"}, offering(RDMA, TCP), r"ucx\.tls=tcp leaves out RDMA"),
        ({}, offering(TCP), r'pip install "kvconnector\[rdma\]"'),
        ({}, offering(TCP), "libuct_ib.so.0 cannot be loaded: .*ibverbs1"),
    ],
)
def test_the_reason_for_no_rdma_lane_is_reported(two_ports, lock_limit, options, offers, remedy):
    lock_limit(8 << 20 if "lock" in remedy else None)
    folder = two_ports / "lib"
    (folder / "ucx").mkdir(parents=True)
    if "cannot be loaded" in remedy:
        (folder / "ucx/libuct_ib.so.0").touch()
    why = choice(offers, folder / "libucp.so.0").explain(options)
    assert re.search(remedy, why), why


@pytest.mark.parametrize(
    "driver, brought, remedy",
    [
        ("mlx5_core", False, "/dev/infiniband"),
        ("mlx5_core", True, "/dev/infiniband"),
        ("efa", False, "ibverbs-providers"),
        ("efa", True, "NVIDIA's NICs .* the system's libucp"),
    ],
)
def test_the_reason_why_ucx_opens_no_port_is_reported(sysfs, driver, brought, remedy):
    """The transports are a library that can be loaded here."""
    device = sysfs.pci("pci0000:00/0000:00:01.0", 0)
    (sysfs.root / "drivers" / driver).mkdir(parents=True)
    (device / "driver").symlink_to(sysfs.root / "drivers" / driver)
    sysfs.port("ibp0s1", device)
    (sysfs.root / "ucx").mkdir()
    (sysfs.root / "ucx/libuct_ib.so.0").symlink_to(path_of(ctypes.CDLL(None).accept))
    if brought:
        (sysfs.root / "libibverbs-1de1263b.so.1").touch()
    why = choice(offering(TCP), sysfs.root / "libucp.so.0").explain({})
    assert re.search(remedy, why), why


def on_another_host(transport):
    """Return a transport's address as if it were on another host."""
    here = WorkerAddress.decode(transport.address)
    return replace(here, host_id=b"?" * HOST_ID_BYTES, shares_memory=False).encode()


def test_an_address_with_a_deeply_nested_field_that_is_not_known_is_malformed():
    body = msgspec.msgpack.encode(WorkerAddress(b"", 1, 1, False, b""))
    body = bytes([body[0] + 1]) + body[1:] + b"\x91" * 60_000 + b"\xc0"
    with pytest.raises(RemoteProtocolError, match="malformed"):
        WorkerAddress.decode(struct.pack("<4sI", b"KVU2", zlib.crc32(body)) + body)


def test_tcp_to_another_host_is_warned_of_once_and_refused_where_rdma_is_required(
    two_ports, caplog, monkeypatch
):
    peer, warned, strict = (
        UcxTransport(load_library(), options={"TLS": "tcp"}, require_rdma=strict)
        for strict in (False, False, True)
    )
    caplog.clear()  # a process's first UCX may have been chosen only now
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not warned.falls_back_to_tcp(warned.connect(peer.address))
        with monkeypatch.context() as without_ports:
            without_ports.setattr(ports, "SYSFS", two_ports / "lib")
            endpoint = warned.connect(on_another_host(peer))
            assert not warned.falls_back_to_tcp(endpoint)
        assert not caplog.records
        for _ in range(2):
            assert warned.falls_back_to_tcp(warned.connect(on_another_host(peer)))
    (record,) = caplog.records
    lanes = warned.lanes(endpoint)  # not lo's, which UCX 1.20.0 cannot use
    assert f"over {lanes}, although" in record.getMessage()
    assert "mlx5_0:1, mlx5_1:1" in record.getMessage()
    strict.connect(peer.address)
    with pytest.raises(IncompatiblePeerError, match=f"ucx.require_rdma is set.*{lanes=}"):
        strict.connect(on_another_host(peer))
    for each in (warned, strict, peer):
        each.close()
