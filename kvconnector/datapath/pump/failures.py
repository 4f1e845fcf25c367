"""What the pump's rows say of a failure, as an error."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvconnector.errors import KVConnectorError, PeerLostError, TransportError
from kvconnector.transport import MessageSizeError
from kvconnector.transport.ucx.libucp import ERR_CANCELED, ERR_MESSAGE_TRUNCATED, Libucp
from kvconnector.transport.ucx.requests import LOSS_STATUSES
from kvconnector_kernels.pump import records as r


def error_of(row: npt.NDArray[np.int64], libucp: Libucp) -> KVConnectorError | None:
    """A program's error, or None."""
    kind, value, chunk = (
        int(row[column]) for column in (r.ERROR_KIND, r.ERROR_VALUE, r.ERROR_CHUNK)
    )
    if kind == r.NO_ERROR:
        return None
    if kind == r.COPY_ERROR:
        return TransportError("a chunk cannot be copied", chunk=chunk, status=value)
    if kind == r.SIZE_ERROR:
        return MessageSizeError(
            "the message does not fit its receive", chunk=chunk, message_bytes=value
        )
    text = libucp.status_text(value)
    if value == ERR_MESSAGE_TRUNCATED:
        return MessageSizeError("the message does not fit its receive", chunk=chunk)
    if value == ERR_CANCELED or value in LOSS_STATUSES:
        return PeerLostError("the peer was lost", chunk=chunk, ucx_status=text)
    return TransportError("UCX failed a chunk", chunk=chunk, ucx_status=text)
