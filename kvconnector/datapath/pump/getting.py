"""Reads over UCX's one-sided gets: the runs of a read, as the pump's compiled function takes them, and a probe's."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.base import Program, ReadOrigin
from kvconnector.datapath.direct.remote_regions import RemoteRegions
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.pulling import End, ends_of
from kvconnector.datapath.pump.ucp import HostParam, function_address
from kvconnector.errors import (
    KVConnectorError,
    LeaseExpiredError,
    PeerLostError,
    TransportError,
)
from kvconnector.planning import GroupBlocks
from kvconnector.planning.common_runs import Window, common_runs
from kvconnector.planning.paths import ReadSize
from kvconnector.transport.ucx import UcxTransport
from kvconnector.transport.ucx.libucp import ERR_CANCELED
from kvconnector.transport.ucx.requests import LOSS_STATUSES
from kvconnector_kernels.pump import gets
from kvconnector_kernels.relayout import PagedSide
from kvconnector_kernels.relayout.sides import check_copy

MAX_RUNS = 1 << 17
"""More are sent: finding and asking for each takes longer than packing them."""
PROBE_BYTES, PROBE_RUN_BYTES, SMALL_PROBE_BYTES = 1 << 20, 32 << 10, 4 << 10
_KEY = struct.Struct("<qq")


@dataclass(slots=True, eq=False)
class Get:
    """Reads that one pull makes, and what they refer to. `rows` are the compiled function's."""

    rows: npt.NDArray[np.int64]
    nbytes: int
    num_runs: int
    kept: object

    @property
    def size(self) -> ReadSize:
        """What its time depends on."""
        nbytes = max(1, self.nbytes)
        return ReadSize(nbytes, nbytes, max(1, self.num_runs))


class Gets:
    """What makes the pump's gets on one transport: the compiled function, and the pulls that it takes.

    Raises:
        TransportError: a version of libucp that is not known.
    """

    wakes: ClassVar[bool] = True

    def __init__(self, transport: UcxTransport, pools: Pools) -> None:
        self._pools = pools
        self._param = HostParam()
        self._compiled = gets.compile_gets()
        self.function, self.stop_function = (int(c.address) for c in self._compiled)
        row = self._context = np.zeros(gets.CONTEXT_FIELDS, np.int64)
        library = transport.libucp.library
        row[gets.GET] = function_address(library, "ucp_get_nbx")
        row[gets.REQUEST_STATUS] = function_address(library, "ucp_request_check_status")
        row[gets.REQUEST_FREE] = function_address(library, "ucp_request_free")
        row[gets.PARAM] = self._param.address
        self.context = row.ctypes.data

    def of_read(self, program: Program, origin: ReadOrigin, remote: RemoteRegions) -> Get:
        """The gets of a read.

        Raises:
            RelayoutError: blocks, heads or rows outside the pools. LocalError: too many runs.
        """
        nbytes, num_left = 0, MAX_RUNS
        found = [np.empty((0, 3), np.int64)]
        for rectangle in program.rectangles:
            segment = program.segments[rectangle.segment]
            theirs = origin.segments[rectangle.segment]
            src, dst = ends_of(rectangle, program, origin, self._pools, remote)
            geometry = check_copy(
                _side(src, origin.blocks[theirs.group]),
                _side(dst, program.blocks[segment.group]),
                num_parts=rectangle.num_parts,
                num_heads=segment.num_heads,
                num_tokens=rectangle.num_tokens,
                head_dim=None,
                item_size_bytes=None,
            )
            runs = common_runs(
                _window(src, origin.blocks[theirs.group], geometry.num_parts, geometry.num_tokens),
                _window(
                    dst, program.blocks[segment.group], geometry.num_parts, geometry.num_tokens
                ),
                num_heads=geometry.num_heads,
                head_dim=geometry.head_dim,
                item_bytes=geometry.item_size_bytes,
                max_runs=num_left,
            )
            num_left -= len(runs)
            nbytes += geometry.nbytes
            found.append(runs)
        get = self._make(np.concatenate(found), remote, nbytes, program)
        get.rows[gets.BUCKET] = remote.bucket_of(origin.lease_key)
        get.rows[gets.BUCKET_KEY] = remote.keys_of(get.rows[[gets.BUCKET]])[0]
        get.rows[gets.LEASE : gets.LEASE + 2] = _KEY.unpack(origin.lease_key)
        get.rows[gets.TOKEN_STOP] = origin.token_stop
        return get

    def of_probe(self, remote: RemoteRegions, nbytes: int, run_bytes: int) -> Get:
        """Gets of so many bytes of the producer's longest region, at most, into memory of nobody."""
        address, available = remote.largest
        nbytes = min(nbytes, available)
        starts = np.arange(0, nbytes, run_bytes, dtype=np.int64)
        scratch = np.ones(nbytes, np.uint8)
        runs = np.stack(
            [
                address + starts,
                scratch.ctypes.data + starts,
                np.minimum(nbytes - starts, run_bytes),
            ],
            axis=1,
        )
        return self._make(runs, remote, nbytes, scratch)

    def _make(
        self, runs: npt.NDArray[np.int64], remote: RemoteRegions, nbytes: int, kept: object
    ) -> Get:
        keys = remote.keys_of(runs[:, 0])
        return Get(gets.make_pull(np.column_stack([runs, keys])), nbytes, len(runs), (kept, remote))


def error_of(status: int, transport: UcxTransport) -> KVConnectorError:
    """What the status of a get that failed means."""
    if status == gets.RETRACTED:
        return LeaseExpiredError("the lease ended while its blocks were read")
    text = transport.libucp.status_text(-status)
    if -status == ERR_CANCELED or -status in LOSS_STATUSES:
        return PeerLostError("the peer was lost", ucx_status=text)
    return TransportError("UCX failed to read the producer's memory", ucx_status=text)


def _side(end: End, blocks: GroupBlocks) -> PagedSide:
    ids = np.ascontiguousarray(blocks.block_ids, np.int32)
    return PagedSide(end.table, ids, end.part_start, end.head_start, end.token_start, end.runs)


def _window(end: End, blocks: GroupBlocks, num_parts: int, num_tokens: int) -> Window:
    """A side's part of a read, which `check_copy` has accepted."""
    tokens = np.arange(end.runs.skip_tokens, end.runs.skip_tokens + num_tokens, dtype=np.int64)
    turn, place = np.divmod(tokens, end.runs.run_tokens)
    return Window(
        rows=end.table.rows[end.part_start : end.part_start + num_parts],
        block_ids=np.asarray(blocks.block_ids),
        block_size=end.table.block_size,
        head_start=end.head_start,
        positions=end.token_start + turn * end.runs.step_tokens + place,
    )
