"""The address that workers exchange: UCX's own, with the host and the process that it belongs to.

Endpoints within a host are opened without UCX's watch, and the peer's process is watched instead. That works where both
processes see one another: same boot, same network and process namespaces. Containers that do not count as two hosts.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvconnector.errors import IncompatiblePeerError, RemoteProtocolError

_HEADER = struct.Struct("<4sI")
"""The mark of this kind of address, and the CRC-32 of all that follows."""
_MAGIC = b"KVU2"

HOST_ID_BYTES = 16
MAX_ADDRESS_BYTES = 1 << 16
_COMPATIBLE_VERSIONS = ({(1, 22), (1, 23)},)
"""Versions of UCX that exchange long and short messages, by shared memory and TCP, with a different version."""
_STAT_STATE, _STAT_START_TIME = 0, 19
_DEAD_STATES = frozenset("ZXx")


class WorkerAddress(msgspec.Struct, frozen=True, array_like=True):
    """One worker: where it runs and how UCX reaches it.

    `start_time` (clock ticks after boot) distinguishes processes that had the same id. `shares_memory` is True if its
    UCX may use shared memory. `tcp_segment_bytes` is 0 where UCX chooses it. `ucx_version` is major and minor, (0, 0)
    where it is not stated.
    """

    host_id: bytes
    process_id: Annotated[int, Meta(ge=1, lt=1 << 31)]
    start_time: int
    shares_memory: bool
    ucx_address: bytes
    tcp_segment_bytes: int = 0
    ucx_version: tuple[int, int] = (0, 0)

    def encode(self) -> bytes:
        """Return the bytes that peers exchange."""
        body = msgspec.msgpack.encode(self)
        return _HEADER.pack(_MAGIC, zlib.crc32(body)) + body

    @classmethod
    def decode(cls, encoded: bytes) -> WorkerAddress:
        """Return the address in `encoded`. UCX parses addresses without bounds checks, so no damaged one may reach it.

        Raises RemoteProtocolError: the bytes are too short, too long, damaged, or of another version.
        """
        body = encoded[_HEADER.size :]
        header = _HEADER.pack(_MAGIC, zlib.crc32(body))
        if len(encoded) > MAX_ADDRESS_BYTES or encoded[: _HEADER.size] != header:
            raise RemoteProtocolError(
                "these bytes are not a UCX address", length_bytes=len(encoded)
            )
        try:
            return msgspec.msgpack.decode(body, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise RemoteProtocolError(f"this UCX address is malformed: {error}") from error

    def same_host(self, other: WorkerAddress) -> bool:
        """Returns True if each process can see the other end."""
        return self.host_id == other.host_id

    def shares_memory_with(self, other: WorkerAddress) -> bool:
        """Returns True if UCX connects the two through shared memory, as far as options allow it."""
        return self.same_host(other) and self.shares_memory and other.shares_memory

    def check_compatible(self, here: WorkerAddress) -> None:
        """Raise IncompatiblePeerError if this worker and the one `here` have versions of UCX, or lengths of tcp's
        messages, that do not work together.

        Two minor versions of UCX mostly exchange short messages, but long ones over TCP fail or never end, since keys
        of memory and protocols differ.
        """
        versions = {self.ucx_version, here.ucx_version}
        if len(versions) > 1 and (0, 0) not in versions and versions not in _COMPATIBLE_VERSIONS:
            raise IncompatiblePeerError(
                "both engines need the same version of UCX: see ucx.library",
                here="{}.{}".format(*here.ucx_version),
                peer="{}.{}".format(*self.ucx_version),
            )
        ours, theirs = here.tcp_segment_bytes, self.tcp_segment_bytes
        if ours and theirs and ours != theirs and not self.shares_memory_with(here):
            raise IncompatiblePeerError(
                "both engines need the same ucx.tcp_segment_bytes", here=ours, peer=theirs
            )

    def process_alive(self) -> bool:
        """Returns True if the process still runs, as far as this one can see. Only meaningful on its own host."""
        try:
            os.kill(self.process_id, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # another user's
        known = _state_and_start(self.process_id)
        return known is None or (known[0] not in _DEAD_STATES and known[1] == self.start_time)


def this_process() -> tuple[bytes, int, int]:
    """Return the first three fields of the address of a worker in this process."""
    process_id = os.getpid()
    _, start_time = _state_and_start(process_id) or ("", 0)
    return _host_id(), process_id, start_time


def _host_id() -> bytes:
    """Return 16 bytes that are equal in two processes if they can share memory and see each other, else not."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
        namespaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "pid", "ipc")]
    except OSError:
        # Nothing can be compared here, so count as a separate host: correct everywhere, and slower on one host.
        return os.urandom(HOST_ID_BYTES)
    identity = boot_id + repr(namespaces).encode()
    return hashlib.blake2b(identity, digest_size=HOST_ID_BYTES).digest()


def _state_and_start(process_id: int) -> tuple[str, int] | None:
    """Return a process's state, one letter, and its start, in clock ticks after boot.

    Returns None if /proc does not show them: there is no such process, or it is another user's (hidepid).
    """
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text("ascii", "replace")
    except OSError:
        return None
    # The name, in parentheses, may hold anything; the fields after it may not.
    fields = stat.rpartition(")")[2].split()
    return fields[_STAT_STATE], int(fields[_STAT_START_TIME])
