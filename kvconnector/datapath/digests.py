"""Digests of packed chunks, which travel behind them: XXH3, 64 bits."""

from __future__ import annotations

import ctypes

from kvconnector.datapath.direct.cuda_driver import load_libcuda
from kvconnector.errors import ConfigError, TransportError

DIGEST_BYTES = 8
ROOM_BYTES = 64
"""What a slot has behind a chunk: enough for a digest, and the next slot is aligned as without it."""


class Digests:
    """States and checks digests of chunks in slots on `device` ("cpu" or "cuda:N"), whose bytes must be there. Those of
    GPUs are copied to the host, and the caller waits.

    Raises:
        ConfigError: the package xxhash is not installed.
        TransportError: the CUDA driver is missing.
    """

    def __init__(self, device: str) -> None:
        try:
            from xxhash import xxh3_64_digest
        except ImportError as exc:
            raise ConfigError(
                "verify=checksum needs the package xxhash: pip install 'kvconnector[checksum]'"
            ) from exc
        self._digest_of = xxh3_64_digest
        self._cuda = None if device == "cpu" else load_libcuda("cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2")

    def state(self, address: int, nbytes: int) -> None:
        """Write the digest of a chunk behind it."""
        digest = self._digest_of(self._read(address, nbytes))
        if self._cuda is None:
            ctypes.memmove(address + nbytes, digest, DIGEST_BYTES)
        else:
            where = ctypes.c_uint64(address + nbytes)
            _check(self._cuda.cuMemcpyHtoD_v2(where, digest, ctypes.c_size_t(DIGEST_BYTES)))

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether a chunk has the digest that is behind it."""
        found = memoryview(self._read(address, nbytes + DIGEST_BYTES)).cast("B")
        return bool(self._digest_of(found[:nbytes]) == found[nbytes:])

    def _read(self, address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
        if self._cuda is None:
            return (ctypes.c_char * nbytes).from_address(address)
        on_host = ctypes.create_string_buffer(nbytes)
        _check(
            self._cuda.cuMemcpyDtoH_v2(on_host, ctypes.c_uint64(address), ctypes.c_size_t(nbytes))
        )
        return on_host


def _check(status: int) -> None:
    if status:
        raise TransportError("a chunk cannot be copied from or to the GPU", status=status)
