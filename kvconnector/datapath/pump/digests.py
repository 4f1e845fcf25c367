"""The functions with which the loop appends and checks the digests of chunks, for `verify=checksum`."""

from __future__ import annotations

import ctypes
from importlib import import_module

from kvconnector.datapath.direct.cuda_driver import load_libcuda
from kvconnector.errors import ConfigError, TransportError
from kvconnector_kernels.library import address_of_function
from kvconnector_kernels.pump.records import State

ROOM_BYTES = 64
"""Bytes that are added to a slot after its chunk: enough for a digest, and such that the next slot keeps its alignment.
"""


class Digests:
    """XXH3 of 64 bits, as compiled in the package xxhash, for chunks in slots of `slot_bytes` on `device`.

    Raises:
        ConfigError: The package xxhash is not installed, or does not export this function.
        TransportError: the CUDA driver is missing, or gives no pinned memory.
    """

    def __init__(self, device: str, slot_bytes: int) -> None:
        try:
            compiled = import_module("xxhash._xxhash")
            self._library = ctypes.CDLL(compiled.__file__)
            self._functions = {"digest": address_of_function("XXH3_64bits", self._library)}
        except (ImportError, OSError, AttributeError) as exc:
            raise ConfigError(
                "verify=checksum needs the package xxhash: pip install 'kvconnector[checksum]'",
                reason=str(exc),
            ) from exc
        if device != "cpu":
            import torch

            cuda = load_libcuda("cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2")
            try:
                # from pageable memory a digest may reach the GPU after the call that copies it, and after the send
                with torch.cuda.device(device):
                    self._room = torch.empty(slot_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as exc:
                raise TransportError(
                    f"no pinned memory for digests: {exc}", nbytes=slot_bytes
                ) from exc
            self._functions["digest_room"] = self._room.data_ptr()
            self._functions["copy_to_host"] = address_of_function("cuMemcpyDtoH_v2", cuda)
            self._functions["copy_to_device"] = address_of_function("cuMemcpyHtoD_v2", cuda)

    def attach(self, state: State) -> None:
        """Let the loop's `state` call these functions, for as long as this object lives."""
        for field, address in self._functions.items():
            setattr(state, field, address)
