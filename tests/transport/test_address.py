"""How a process can find out if a peer's process lives."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvconnector.errors import IncompatiblePeerError, RemoteProtocolError
from kvconnector.transport.ucx.address import WorkerAddress, this_process
from kvconnector.transport.ucx.ports import lockable_bytes
from tests.support.remote import RemoteObject


def address_of_this_process():
    return WorkerAddress(*this_process(), True, b"", ucx_version=(1, 21))


def test_a_process_is_alive_until_it_ends():
    peer = RemoteObject("tests.transport.test_address:address_of_this_process")
    address = WorkerAddress.decode(peer.call("encode"))
    assert address.process_alive()
    peer.release()
    assert not address.process_alive()


def test_a_process_that_is_not_reaped_or_whose_id_is_reused_is_dead():
    child = subprocess.Popen(["sleep", "60"])
    here = address_of_this_process()
    assert not replace(here, process_id=child.pid).process_alive()
    started = int(Path(f"/proc/{child.pid}/stat").read_text().split()[21])
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not replace(here, process_id=child.pid, start_time=started).process_alive()
    child.wait()


def test_a_process_may_have_any_bytes_as_its_name():
    """The kernel cuts names after 15 bytes, even in the middle of a letter."""
    libc, set_name, own = ctypes.CDLL(None), 15, Path("/proc/self/comm").read_bytes().strip()
    libc.prctl(set_name, b") \xc3", 0, 0, 0)
    try:
        assert address_of_this_process().process_alive()
        assert lockable_bytes() is None or lockable_bytes() > 0
    finally:
        libc.prctl(set_name, own, 0, 0, 0)


@pytest.mark.parametrize("process_id", [0, -1, 1 << 31])
def test_an_impossible_process_id_is_refused_unused(process_id):
    address = replace(address_of_this_process(), process_id=process_id)
    with pytest.raises(RemoteProtocolError, match="malformed"):
        WorkerAddress.decode(address.encode())


@pytest.mark.parametrize(
    "here, peer, fit",
    [
        ((1, 21), (1, 21), True),
        ((1, 22), (1, 23), True),
        ((1, 23), (1, 22), True),
        ((0, 0), (1, 21), True),
        ((1, 21), (1, 22), False),
        ((1, 23), (1, 21), False),
        ((1, 18), (1, 20), False),
    ],
)
def test_versions_of_ucx_that_do_not_understand_each_other_are_refused(here, peer, fit):
    ours, theirs = (
        replace(address_of_this_process(), ucx_version=version) for version in (here, peer)
    )
    theirs = WorkerAddress.decode(theirs.encode())
    if fit:
        theirs.check_compatible(ours)
        return
    words = rf"same version of UCX.*here='{here[0]}\.{here[1]}', peer='{peer[0]}\.{peer[1]}'"
    with pytest.raises(IncompatiblePeerError, match=words):
        theirs.check_compatible(ours)


HIDDEN = """
import ctypes, os, sys
from kvconnector.transport.ucx.address import WorkerAddress
CLONE_NEWNS, MS_PRIVATE, MS_REC, NOBODY = 0x20000, 1 << 18, 1 << 14, 65534
libc = ctypes.CDLL(None, use_errno=True)
if (
    libc.unshare(CLONE_NEWNS)
    or libc.mount(b"none", b"/", None, MS_PRIVATE | MS_REC, None)
    or libc.mount(b"proc", b"/proc", b"proc", 0, sys.argv[2].encode())
):
    sys.exit(77)
os.setgroups([])
os.setgid(NOBODY)
os.setuid(NOBODY)
assert not os.access(f"/proc/{os.getppid()}/stat", os.R_OK)
peer = WorkerAddress.decode(bytes.fromhex(sys.argv[1]))
sys.exit(0 if peer.process_alive() else 1)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts /proc anew, which takes root")
@pytest.mark.parametrize("option", ["hidepid=1", "hidepid=2"])
def test_another_users_process_that_proc_hides_is_alive(option):
    encoded = address_of_this_process().encode().hex()
    ended = subprocess.run([sys.executable, "-c", HIDDEN, encoded, option], check=False, timeout=60)
    if ended.returncode == 77:
        pytest.skip("/proc cannot be mounted here")
    assert ended.returncode == 0
