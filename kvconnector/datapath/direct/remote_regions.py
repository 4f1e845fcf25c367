"""A producer worker's pools as a consumer on another host reaches them: its own addresses, and keys to them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvconnector.datapath.direct import board
from kvconnector.datapath.direct.remote_pools import tables_of
from kvconnector.errors import TransportError
from kvconnector.transport.ucx.rma import Rma
from kvconnector.wire.export import PoolExport


class RemoteRegions:
    """An export's regions, opened for one endpoint. `export` must have passed `check_export`, and has regions.

    Raises:
        TransportError: memory on a GPU, or keys that UCX cannot use. RemoteProtocolError: keys that are none.
    """

    def __init__(self, export: PoolExport, rma: Rma, endpoint_handle: int) -> None:
        if export.device != "cpu":
            raise TransportError("only host memory is read over UCX", theirs=export.device)
        self.tables = tables_of(export, "cpu")
        self._export = export
        self._rma = rma
        self._starts = np.array([region.address for region in export.regions], np.int64)
        self._keys: list[int] = []
        try:
            for region in export.regions:
                self._keys.append(rma.unpack(endpoint_handle, region.key))
        except BaseException:
            self.close()
            raise

    def keys_of(self, addresses: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The `ucp_rkey_h` of the region that each address is in."""
        index = np.searchsorted(self._starts, addresses, side="right") - 1
        return np.array(self._keys, np.int64)[index]

    def bucket_of(self, lease_key: bytes) -> int:
        """Where the producer's lease board has the bucket of a lease."""
        offset = board.bucket_offset(lease_key, self._export.num_buckets)
        return self._export.board_address + offset

    @property
    def largest(self) -> tuple[int, int]:
        """Address and bytes of the longest region."""
        region = max(self._export.regions, key=lambda region: region.nbytes)
        return region.address, region.nbytes

    def close(self) -> None:
        """Let go of the keys: no read may be under way. Idempotent."""
        keys, self._keys = self._keys, []
        for key in keys:
            self._rma.destroy(key)
