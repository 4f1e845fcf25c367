"""The loop's steps with a chunk's digest, for `verify=checksum`: stated after packing, checked before unpacking.

A digest is XXH3 of 64 bits, big-endian, in the `DIGEST_BYTES` after the chunk, which the bytes of its job count. A
GPU's chunk is copied to the host to be hashed, and its digest back: the loop waits for both, which needs the room on
the host to be pinned.
"""

from __future__ import annotations

from kvconnector_kernels.pump.native import call, load, store, swap_bytes
from kvconnector_kernels.pump.steps import helper

DIGEST_BYTES = 8
CORRUPTED = 1 << 16
"""Returned by `check` for a damaged chunk; no `CUresult` is as large."""


@helper
def _digest_of(state, address, nbytes):
    return swap_bytes(call(state.digest, (address, nbytes)))


@helper
def append(state, address, nbytes):
    """Write the digest of a packed chunk after it; both have `nbytes`. Returns 0 or the device's error."""
    if state.digest == 0:
        return 0
    size = nbytes - DIGEST_BYTES
    if state.digest_room == 0:
        store(address + size, _digest_of(state, address, size))
        return 0
    room = state.digest_room
    status = call(state.copy_to_host, (room, address, size)) & 0xFFFFFFFF
    if status == 0:
        store(room, _digest_of(state, room, size))
        status = call(state.copy_to_device, (address + size, room, DIGEST_BYTES)) & 0xFFFFFFFF
    return status


@helper
def check(state, address, nbytes):
    """Compare a chunk with the digest after it; both have `nbytes`. Returns 0, `CORRUPTED` or the device's error."""
    if state.digest == 0:
        return 0
    if state.digest_room:
        status = call(state.copy_to_host, (state.digest_room, address, nbytes)) & 0xFFFFFFFF
        if status:
            return status
        address = state.digest_room
    size = nbytes - DIGEST_BYTES
    return 0 if load(address + size) == _digest_of(state, address, size) else CORRUPTED
