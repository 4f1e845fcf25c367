"""Opening a worker's data path: slots within the budget, copies for the device, and direct reads where possible."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from kvconnector.config import ConnectorConfig
from kvconnector.datapath.direct.board import LeaseBoard
from kvconnector.datapath.direct.export import export_pools
from kvconnector.datapath.event_queue import as_connector_error
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import Copies, program_cap
from kvconnector.datapath.pump.copies_cpu import CpuCopies
from kvconnector.datapath.pump.copies_cuda import CudaCopies
from kvconnector.datapath.pump.copy_threads import default_threads
from kvconnector.datapath.pump.datapath import DataPath
from kvconnector.datapath.pump.digests import ROOM_BYTES, Digests
from kvconnector.datapath.staging import SlotPool, slots_within
from kvconnector.errors import ConfigError, KVConnectorError
from kvconnector.transport.ucx import UcxTransport
from kvconnector.wire.export import PoolExport
from kvconnector_kernels.relayout import RelayoutError

logger = logging.getLogger(__name__)


def open_datapath(
    config: ConnectorConfig,
    pools: Pools,
    transport: UcxTransport,
    clock: Callable[[], float] = time.monotonic,
) -> DataPath:
    """Open a worker's data path over `transport`, with as many slots as fit the staging budget.

    Args:
        config: The worker's settings.
        pools: Its registered caches.
        transport: The transport to other workers, which the data path will close.
        clock: Returns seconds, see `DataPath`.

    Raises:
        ConfigError: One token of one part of some layer does not fit into a chunk, the package that checks chunks is
            not installed, or `paths.shared_folder` cannot be used.
        TransportError: The device lacks features that copies need.
    """
    device, is_checked = pools.device, config.verify == "checksum"
    chunk_bytes = _chunk_bytes(config, pools)
    slot_bytes = chunk_bytes + (ROOM_BYTES if is_checked else 0)
    sends, receives = config.role != "consumer", config.role != "producer"
    num_slots = slots_within(config.staging.budget_bytes, slot_bytes, sends + receives)
    send_slots, recv_slots = (
        SlotPool(num_slots if each else 0, slot_bytes, device) for each in (sends, receives)
    )
    slots = send_slots if sends else recv_slots
    copies = _open_copies(config, pools, slots, chunk_bytes)
    copies.warm_up(packing=sends, unpacking=receives)
    if is_checked:
        copies.digests = Digests(device, slot_bytes)
        logger.info("verify=checksum: all reads are packed, and each chunk is checked")
    why_packed = why_reads_packed = _why_unwanted(config)
    board, export = None, None
    if sends and not why_packed:
        board, export, why_packed = _share(pools, copies, config.paths.shared_folder)
    with ExitStack() as opened:
        if board is not None:
            opened.callback(board.close)
        path = DataPath(
            config,
            transport,
            copies,
            board=board,
            export=export,
            export_again=None
            if board is None
            else partial(export_pools, pools, board, config.paths.shared_folder),
            why_packed=why_packed,
            why_reads_packed=why_reads_packed or (_why_unreadable(copies) if receives else ""),
            send_slots=send_slots,
            recv_slots=recv_slots,
            clock=clock,
        )
        opened.pop_all()
    return path


def _chunk_bytes(config: ConnectorConfig, pools: Pools) -> int:
    """Return the bytes of a chunk. Raises ConfigError: see `open_datapath`."""
    chunk_bytes = config.chunk_bytes(pools.device, pools.largest_row_bytes)
    for group in pools.groups:
        for part in group.geometry.parts:
            if part.token_bytes > chunk_bytes:
                raise ConfigError(
                    "staging.chunk_bytes is smaller than one token, or one state, of one part:"
                    " raise it, and staging.budget_bytes to twice as much at least",
                    chunk_bytes=chunk_bytes,
                    part=part.name,
                    token_bytes=part.token_bytes,
                )
    return chunk_bytes


def _open_copies(
    config: ConnectorConfig, pools: Pools, slots: SlotPool, chunk_bytes: int
) -> Copies:
    """Make the copies between the pools and slots like these."""
    if pools.device == "cpu":
        num_threads = config.paths.copy_threads or default_threads()
        return CpuCopies(pools, chunk_bytes, num_threads=num_threads)
    try:
        return CudaCopies(
            pools,
            # an address as badly aligned as any slot's
            slot_address=slots.address(0) | slots.slot_bytes,
            slot_bytes=chunk_bytes,
            max_programs=program_cap(config.staging.max_programs, pools.device),
        )
    except RelayoutError as error:
        raise as_connector_error(error) from error


def _share(
    pools: Pools, copies: Copies, shared_folder: str
) -> tuple[LeaseBoard | None, PoolExport | None, str]:
    """Let consumers read this worker's pools. If they cannot, returns the reason, which is in the log, too. Raises
    ConfigError: see `export_pools`.
    """
    try:
        with ExitStack() as stack:
            board = LeaseBoard(copies.open_writer)
            stack.callback(board.close)
            export = export_pools(pools, board, shared_folder)
            stack.pop_all()
            return board, export, ""
    except ConfigError:
        raise
    except KVConnectorError as error:
        logger.info("no consumer can read these pools directly: %s", error)
        return None, None, error.statement


def _why_unwanted(config: ConnectorConfig) -> str:
    """Return which setting keeps this worker from direct reads, of its pools and of others'; empty if none does."""
    if config.verify == "checksum":
        return "verify is checksum, and only packed reads are checked"
    return "paths.direct is never" if config.paths.direct == "never" else ""


def _why_unreadable(copies: Copies) -> str:
    """Return why other workers' pools on the host cannot be read, which is in the log, too; empty if they can."""
    try:
        copies.warm_up_reads()
    except (RelayoutError, KVConnectorError) as error:
        logger.info("no producer's pools can be read directly: %s", error)
        return error.message if isinstance(error, KVConnectorError) else str(error)
    return ""
