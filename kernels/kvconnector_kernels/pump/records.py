"""The library's structs and constants as Python sees them: the mirror of kernels/native/kvc.h, which describes them.

`SEND`, `RECEIVE` and `READ` are programs, one per transfer; a `SLOT` is a piece of staging memory: these stand in
arrays of numpy's, since Python writes whole rows. `State` is all of a loop: its settings and counters, C functions, and
where the others are. Fields of other threads' and of pointers are numbers here.
"""

from __future__ import annotations

import ctypes
from ctypes import c_char, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from typing import Any, cast

import numpy as np

from kvconnector_kernels.library import check_mirror

# Phases of a program: a free record is `VACANT`, which the caller sets.
VACANT, RUNNING, QUIET, OVER = 0, 1, 2, 3

# Why a program failed. `error_value` is a UCX status, the status of a copy or of a read, or the bytes of a message.
NO_ERROR, UCX_ERROR, COPY_ERROR, SIZE_ERROR, READ_ERROR = 0, 1, 2, 3, 4

# States of a slot. The caller takes a `FAILED` one, whose message may still be read; a `DETACHED` one lacks memory.
FREE, COPYING, PACKED, POSTED, ARRIVED, FAILED, DETACHED = 0, 1, 2, 3, 4, 5, 6

# Who owns the lock, and so may touch the records.
NOBODY, DRIVER, INLINE = 0, 1, 2

# What a call of a `READ`'s function returns: a part is done, call again; or all is begun, and the fence will be set.
# Else an error: nothing is left to begin, and the fence will be set all the same.
MORE, ALL = -1, 0

# Why a run ended.
NOTICE, READABLE, TIMEOUT = 1, 2, 3

# Types of elements that can be converted, in a `CopyJob`.
FLOAT16, BFLOAT16, FLOAT8_E4M3, FLOAT8_E5M2 = 1, 2, 3, 4

CALL_BYTES = 1 << 20
"""A call of a read on the CPU copies about this many bytes, or one piece. Control messages wait for it: about a tenth
of a millisecond."""
MAX_PARAMS = 40
"""Most parameters of a kernel."""
ENTRIES_PER_BUCKET = 8
"""Of a lease board."""
DIGEST_BYTES = 8
CORRUPTED = 1 << 16
"""The error of a damaged chunk; no `CUresult` is as large."""
NUM_NOTES, NOTE_BYTES = 256, 256
"""Messages of UCX's log that are kept until they are read, and the bytes of each."""
_LINE_BYTES = 64


def _numbers(names: str) -> list[tuple[str, Any]]:
    return [(name, c_int64) for name in names.split()]


def _pointers(names: str) -> list[tuple[str, Any]]:
    return [(name, c_void_p) for name in names.split()]


class Part(ctypes.Structure):
    """A row of a part table: address and byte strides."""

    _fields_ = (*_pointers("base"), *_numbers("block_stride head_stride token_stride dim_stride"))


class SideRecord(ctypes.Structure):
    """A window into pools; `parts` is null for a chunk's slot."""

    _fields_ = (
        *_pointers("parts block_ids"),
        *_numbers("block_size head_start token_start run_tokens step_tokens skip_tokens"),
    )


class CopyJob(ctypes.Structure):
    """The same heads and tokens of some parts, from one side to the other, in host memory."""

    _fields_ = (
        *_numbers("nbytes num_parts num_heads num_tokens head_dim item_bytes is_streamed"),
        *_numbers("part_stride conversion"),
        *_pointers("scales"),
        ("slot", Part),
        ("src", SideRecord),
        ("dst", SideRecord),
    )


class CopyRead(ctypes.Structure):
    """A read of a peer's pools in host memory. Its jobs follow it."""

    _fields_ = (*_numbers("num_jobs next_piece piece_bytes num_helpers"),)


class Crew(ctypes.Structure):
    """Threads that help with a read."""

    _fields_ = (*_pointers("read fence"), ("is_closed", c_uint32), ("eventfd", c_int32))


class CudaJob(ctypes.Structure):
    """A launch: of the kernel's parameters one is the slot's address."""

    _fields_ = (
        *_numbers("nbytes"),
        *_pointers("function"),
        *_numbers("num_programs num_threads shared_bytes num_params slot_param"),
        *_pointers("stream"),
        ("params", c_int64 * MAX_PARAMS),
    )


class Cuda(ctypes.Structure):
    """The CUDA driver's functions."""

    _fields_ = (*_pointers("launch_kernel write_value memcpy_to_device"),)


class CudaRead(ctypes.Structure):
    """A read of a peer's pools on a GPU. Its jobs follow it."""

    _fields_ = (
        *_numbers("num_jobs"),
        ("ids_there", c_uint64),
        *_pointers("ids_here"),
        *_numbers("ids_bytes"),
        *_pointers("stream"),
    )


class LaunchRecord(ctypes.Structure):
    """A launch of one part, from which the jobs of a span are made: indices of a job's words, and its tiles."""

    _fields_ = (
        *_numbers("src_ids dst_ids src_part dst_part num_tiles num_token_tiles"),
        *_numbers("lead_tokens tile_tokens tiles_beside"),
    )


class SpanRecord(ctypes.Structure):
    """What differs between a launch and the jobs of a span."""

    _fields_ = (
        *_numbers("src_further dst_further more_tokens num_tokens src_ids dst_ids"),
        *_numbers("src_part dst_part stream part_bytes max_programs max_uncapped_bytes"),
    )


_PROGRAM = (
    *_numbers("phase stopped"),
    *_pointers("jobs"),
    *_numbers("error_kind error_value error_chunk"),
)
_CHUNKS = _numbers("first_tag num_chunks window next_chunk num_posted num_copying")


class SendRecord(ctypes.Structure):
    """A program: see kvc.h."""

    _fields_ = (
        *_PROGRAM,
        *_CHUNKS,
        *_pointers("endpoint"),
        *_numbers("num_in_flight owner packing_ns packed_ns sending_ns sent_ns"),
    )


class ReceiveRecord(ctypes.Structure):
    """A program: see kvc.h."""

    _fields_ = (
        *_PROGRAM,
        *_CHUNKS,
        *_numbers("started_ns ended_ns limit num_unpacked arriving_ns arrived_ns"),
    )


class ReadRecord(ctypes.Structure):
    """A program: see kvc.h."""

    _fields_ = (
        *_PROGRAM,
        *_numbers("started_ns ended_ns"),
        *_pointers("function context"),
        *_numbers("num_calls all_begun"),
        *_pointers("fence"),
        *_numbers("fence_value"),
    )


class SlotRecord(ctypes.Structure):
    """A piece of staging memory."""

    _fields_ = (
        *_numbers("state program chunk"),
        *_pointers("request address fence"),
        *_numbers("fence_value length owner"),
    )


class Run(ctypes.Structure):
    """How long an owner's run may take, and which descriptors end it."""

    _fields_ = (*_numbers("owner limit_ns"), *_pointers("poll_fds"), *_numbers("num_fds"))


def _on_lines(*names: str) -> list[tuple[str, Any]]:
    """Return words on cache lines of their own."""
    fields: list[tuple[str, Any]] = []
    for name in names:
        fields += [(name, c_uint32), (f"_after_{name}", c_char * (_LINE_BYTES - 4))]
    return fields


class Lock(ctypes.Structure):
    """The words of the driver lock. `aligned_lock` makes one."""

    _fields_ = (*_on_lines("owner", "pending", "looping", "inline_thread", "wanted"),)


class TagInfo(ctypes.Structure):
    """`ucp_tag_recv_info_t`."""

    _fields_ = (("tag", c_uint64), ("length", c_uint64))


class State(ctypes.Structure):
    """All of a loop."""

    _fields_ = (
        *_pointers("sends receives reads send_slots recv_slots"),
        *_numbers("num_sends num_receives num_reads num_send_slots num_recv_slots"),
        *_pointers("runs"),
        *_numbers("entering wants_slots return_by_ns"),
        *_pointers("copy copy_context"),
        *_numbers("job_bytes"),
        *_pointers("digest digest_room copy_to_host copy_to_device"),
        *_numbers("spin_after_work_ns offer_work_ns"),
        *_pointers("begin begin_argument worker worker_progress worker_arm tag_send tag_recv"),
        *_pointers("tag_probe request_status request_free request_cancel recv_test send_param"),
        *_pointers("recv_param recv_info"),
        ("control_tag", c_uint64),
        *_pointers("clock_gettime usleep wake_fd lock"),
        *_numbers(
            "send_turn read_turn num_inline moved_ns yield_gil_us pending_ns left_loop_ns shared_gil_ns"
        ),
    )


class BoardEntry(ctypes.Structure):
    """A lease on a lease board."""

    _fields_ = (
        ("key", c_uint32 * 4),
        *((name, c_int32) for name in ("expected", "ready", "num_tokens", "ahead")),
    )


class Note(ctypes.Structure):
    """A message of UCX's log. `number` is written last, and is one more than the messages before it."""

    _fields_ = (
        ("number", c_uint64),
        *_pointers("file function"),
        ("line", c_uint64),
        ("leaks_expected", c_uint64),
        ("text", c_char * NOTE_BYTES),
    )


class Log(ctypes.Structure):
    """The memory of the handler of UCX's log. `leaks_expected` counts who expects messages about leaks."""

    _fields_ = (("count", c_uint64), ("leaks_expected", c_uint64), ("notes", Note * NUM_NOTES))


class TokenShare(ctypes.Structure):
    """Which of a request's tokens are in a group's table on this rank: see `TableGeometry`."""

    _fields_ = (
        *_numbers("block_size kernel_block_size world_size rank interleave_tokens"),
        *_numbers("row_tokens is_ring"),
    )


check_mirror(
    [
        ("part", Part),
        ("side", SideRecord),
        ("copy_job", CopyJob),
        ("copy_read", CopyRead),
        ("crew", Crew),
        ("cuda_job", CudaJob),
        ("cuda", Cuda),
        ("cuda_read", CudaRead),
        ("launch", LaunchRecord),
        ("span", SpanRecord),
        ("send", SendRecord),
        ("receive", ReceiveRecord),
        ("read", ReadRecord),
        ("slot", SlotRecord),
        ("run", Run),
        ("lock", Lock),
        ("tag_info", TagInfo),
        ("state", State),
        ("board_entry", BoardEntry),
        ("note", Note),
        ("log", Log),
        ("token_share", TokenShare),
    ]
)


def record_of(struct: type[ctypes.Structure]) -> np.dtype[np.void]:
    """Return a struct whose fields all have 8 bytes as a numpy record of int64, pointers too."""
    names = [name for name, *_ in struct._fields_]
    assert ctypes.sizeof(struct) == 8 * len(names)
    return np.dtype([(name, np.int64) for name in names])


SEND, RECEIVE, READ, SLOT = map(record_of, (SendRecord, ReceiveRecord, ReadRecord, SlotRecord))
ARRAYS = {"sends": SEND, "receives": RECEIVE, "reads": READ, "send_slots": SLOT, "recv_slots": SLOT}
"""The arrays that a state has the addresses and the lengths of."""


def numbers_of(records: Any) -> memoryview[int]:
    """Return the numbers in an array of such records. numpy takes four times as long for a few when caches are cold."""
    found: memoryview[int] = records.reshape(-1).view(np.int64).data
    return found


def word_of(struct: type[ctypes.Structure], *path: str) -> int:
    """Return the index of a field, or of a field of a field, among the 8-byte words of a struct."""
    offset, within = 0, cast("Any", struct)
    for name in path:
        offset += getattr(within, name).offset
        (within,) = (kind for field, kind, *_ in within._fields_ if field == name)
    return offset // 8


def num_words(struct: type[ctypes.Structure]) -> int:
    """Return the number of 8-byte words of a struct."""
    return ctypes.sizeof(struct) // 8


def aligned_lock() -> Lock:
    """Return a new driver lock, on cache lines of its own."""
    memory = bytearray(ctypes.sizeof(Lock) + _LINE_BYTES)
    start = ctypes.addressof(c_char.from_buffer(memory))
    return Lock.from_buffer(memory, -start % _LINE_BYTES)
