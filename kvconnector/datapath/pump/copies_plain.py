"""The loop's copies through Python, each a call of the re-layout kernel: where the prepared ones cannot be made."""

from __future__ import annotations

import ctypes
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from kvconnector.datapath.base import Program
from kvconnector.datapath.device_memory import await_device
from kvconnector.datapath.direct.cuda_driver import load_libcuda
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import (
    FENCE_WORDS,
    ChunkCopies,
    Fences,
    Jobs,
    Span,
    addresses_of,
    slots_of,
    spans_of,
    words_of,
)
from kvconnector.datapath.pump.marks import Requests
from kvconnector.datapath.pump.network import CORRUPTED
from kvconnector.errors import ConfigError, TransportError
from kvconnector_kernels.pump.records import record_of
from kvconnector_kernels.relayout import PackedSide, relayout, upload_block_ids

logger = logging.getLogger(__name__)

JOB = record_of("nbytes", "program", "span", "first_row", "num_parts", "is_pack")
_Row = ctypes.c_int64 * (JOB.itemsize // 8)
_FAILED = 1
DIGEST_BYTES = 8
ROOM_BYTES = 64
"""What a slot has behind a chunk: enough for a digest, and the next slot is aligned as without it."""


class PlainCopies(ChunkCopies):
    """See `ChunkCopies`. On a GPU they run on a stream of their own.

    `max_programs` caps the Triton kernel's programs; 0 is no cap. With `digests` each chunk has one behind it, for
    which its slot has room.
    """

    job = JOB

    def __init__(
        self,
        pools: Pools,
        *,
        slot_address: int,
        slot_bytes: int,
        max_programs: int,
        digests: Digests | None = None,
    ) -> None:
        self._digests = digests
        self._pools = pools
        self._slots = slots_of(slot_address, slot_bytes, pools.device)
        self._max_programs = max_programs or None
        self._numbers = count(1)
        self._spans: dict[int, list[Span]] = {}
        self._fences: dict[int, Any] = {}
        self._stream: Any = None
        if pools.device == "cpu":
            from kvconnector_kernels.relayout import warm_up

            warm_up()
        else:
            import torch

            self._stream = torch.cuda.Stream(device=pools.device)
        self._function = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 5)(self._call)
        self.function = ctypes.cast(self._function, ctypes.c_void_p).value or 0

    def order_after(self, event: object, requests: Requests | None) -> None:
        if self._stream is not None:
            self._stream.wait_event(event)

    def make_fences(self, count: int) -> Fences:
        import torch

        shape = (count, FENCE_WORDS)
        memory = torch.zeros(shape, dtype=torch.int32, pin_memory=self._stream is not None)
        fences: Fences = memory.numpy()[:, 0]
        self._fences.update(zip(addresses_of(fences).tolist(), memory[:, :1], strict=True))
        return fences

    def make_jobs(self, program: Program, *, packing: bool) -> Jobs:
        with self._on_stream():
            ids = [
                upload_block_ids(blocks.block_ids, num_blocks=limit, device=self._pools.device)
                for blocks, limit in zip(program.blocks, self._pools.num_blocks, strict=True)
            ]
        spans = spans_of(program, self._pools, ids, self._slots)
        rows = np.empty(len(program.chunks), JOB)
        for index, span in enumerate(spans):
            span.check(packing=packing)
            rows["nbytes"][span.chunks] = span.num_parts * span.part_bytes
            rows["span"][span.chunks] = index
            rows["first_row"][span.chunks] = span.first_rows
            rows["num_parts"][span.chunks] = span.num_parts
        number = next(self._numbers)
        self._spans[number] = spans
        rows["program"] = number
        rows["is_pack"] = packing
        rows["nbytes"] += DIGEST_BYTES if self._digests is not None else 0
        return Jobs(words_of(rows), (number,))

    def end_jobs(self, jobs: Jobs) -> None:
        for number in jobs.kept:
            self._spans.pop(number)  # type: ignore[call-overload]  # put there by `make_jobs`

    def finish(self) -> None:
        if self._stream is not None:
            await_device(self._stream.query, "copies on the GPU do not end")

    def check_device(self) -> None:
        try:
            if self._stream is not None:
                self._stream.query()
        except RuntimeError as exc:
            raise TransportError("the GPU failed", device=self._pools.device) from exc

    def _call(self, context: int, job: int, slot: int, fence: int, value: int) -> int:
        nbytes, number, index, first_row, num_parts, is_pack = _Row.from_address(job)
        span = self._spans[number][index]
        nbytes -= DIGEST_BYTES if self._digests is not None else 0
        paged = replace(span.paged, part_start=first_row)
        packed = PackedSide(slot, nbytes, span.packed.order, self._pools.device)
        try:
            if self._digests is not None and not is_pack and not self._digests.holds(slot, nbytes):
                return CORRUPTED
            with self._on_stream():
                relayout(
                    *((paged, packed) if is_pack else (packed, paged)),
                    num_parts=num_parts,
                    num_heads=span.num_heads,
                    num_tokens=span.num_tokens,
                    max_programs=self._max_programs,
                )
                if self._digests is not None and is_pack:
                    self.finish()
                    self._digests.state(slot, nbytes)
                self._set(self._fences[fence], value)
        except Exception:
            logger.exception("a chunk cannot be copied")
            return _FAILED
        return 0

    def _set(self, fence: Any, value: int) -> None:
        """Once the copies so far are through."""
        if self._stream is None:
            fence.fill_(value)
            return
        import torch

        fence.copy_(torch.full_like(fence, value, device=self._pools.device), non_blocking=True)

    def _on_stream(self) -> AbstractContextManager[Any]:
        if self._stream is None:
            return nullcontext()
        import torch

        return torch.cuda.stream(self._stream)


class Digests:
    """States and checks the digests behind chunks in slots on `device`: XXH3, 64 bits. The bytes must be there; a GPU's
    are copied to the host, and the caller waits. Raises ConfigError: the package xxhash is not installed.
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
