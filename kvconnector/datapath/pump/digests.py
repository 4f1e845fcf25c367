"""What the loop needs to state and check the digests of chunks, for `verify=checksum`."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.direct.cuda_driver import load_libcuda
from kvconnector.datapath.pump.network import function_address
from kvconnector.errors import ConfigError

ROOM_BYTES = 64
"""What a slot has after a chunk: enough for a digest, and the next slot is aligned as without it."""


class Digests:
    """XXH3 of 64 bits, as the package xxhash has compiled it, for chunks in slots of `slot_bytes` on `device`.

    Raises:
        ConfigError: the package xxhash is not installed, or does not show this function.
        TransportError: the CUDA driver is missing.
    """

    def __init__(self, device: str, slot_bytes: int) -> None:
        try:
            from xxhash import _xxhash  # type: ignore[attr-defined]  # what is compiled of it

            self._library = ctypes.CDLL(_xxhash.__file__)
            self._functions = {"digest": function_address(self._library, "XXH3_64bits")}
        except (ImportError, OSError, AttributeError) as exc:
            raise ConfigError(
                "verify=checksum needs the package xxhash: pip install 'kvconnector[checksum]'",
                reason=str(exc),
            ) from exc
        self._room = np.empty(0 if device == "cpu" else slot_bytes, np.uint8)
        if device != "cpu":
            cuda = load_libcuda("cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2")
            self._functions["digest_room"] = self._room.ctypes.data
            self._functions["copy_to_host"] = function_address(cuda, "cuMemcpyDtoH_v2")
            self._functions["copy_to_device"] = function_address(cuda, "cuMemcpyHtoD_v2")

    def attach(self, state: npt.NDArray[np.void]) -> None:
        """Let a pump's `state` use it, for as long as this object lives."""
        for field, address in self._functions.items():
            state[field] = address
