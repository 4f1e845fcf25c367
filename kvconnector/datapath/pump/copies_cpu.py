"""The copies of the compiled loop in host memory."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Sequence
from operator import sub

from kvconnector.datapath.direct.remote_pools import RemotePools
from kvconnector.datapath.lanes import Span, Window
from kvconnector.datapath.pools import Pools
from kvconnector.datapath.pump.copies import (
    Copies,
    Jobs,
    packed_sides,
)
from kvconnector.datapath.pump.copy_threads import CopyThreads
from kvconnector.planning import GroupBlocks, Route, SourceRead
from kvconnector.session.load import RankRead
from kvconnector_kernels.pump.copy_cpu import CALL_BYTES, COPY, READ, ROW_BYTES, job_of
from kvconnector_kernels.pump.records import (
    DIGEST_BYTES,
    CopyJob,
    CopyRead,
    SideRecord,
    num_words,
    word_of,
)
from kvconnector_kernels.relayout import Conversion, Side
from kvconnector_kernels.relayout.cpu import MIN_STREAMED_COPY_BYTES
from kvconnector_kernels.relayout.sides import CopyGeometry

logger = logging.getLogger(__name__)

_PAGE = 4096
_NBYTES, _NUM_PARTS, _IS_STREAMED, _SCALES, _SRC, _DST = (
    word_of(CopyJob, name)
    for name in ("nbytes", "num_parts", "is_streamed", "scales", "src", "dst")
)
_ROWS, _IDS, _START, _SKIP = (
    word_of(SideRecord, name) for name in ("parts", "block_ids", "token_start", "skip_tokens")
)
PIECE_BYTES, SHARED_PIECE_BYTES = CALL_BYTES, CALL_BYTES // 4
"""Size of a read's pieces, in bytes. The pieces are short, so that no thread keeps copying long after the others."""
MIN_SHARED_BYTES = 4 << 20
"""A shorter read is one piece: the thread that begins it finishes it before another thread that it woke could help
much.
"""
_READ_WORDS, _JOB_WORDS = num_words(CopyRead), num_words(CopyJob)


class CpuCopies(Copies):
    """See `Copies`. Reads of at least `min_streamed_bytes` bypass the CPU's caches, which could not hold them. Packed
    chunks are written to the cache, because they are sent next. Up to `num_threads` threads copy direct reads of at
    least `min_shared_bytes`, as far as cores are idle.
    """

    job = CopyJob
    function, read_function = COPY, READ
    means = "shared memory"

    def __init__(
        self,
        pools: Pools,
        slot_bytes: int,
        *,
        min_streamed_bytes: int = MIN_STREAMED_COPY_BYTES,
        num_threads: int = 1,
        min_shared_bytes: int = MIN_SHARED_BYTES,
    ) -> None:
        # the alignment of a slot does not matter here
        super().__init__(pools, packed_sides(_PAGE, slot_bytes, "cpu"))
        self._min_streamed_bytes = min_streamed_bytes
        self._num_threads = num_threads
        self._min_shared_bytes = min_shared_bytes
        self._threads: CopyThreads | None = None

    def words_of(
        self, src: Side, dst: Side, geometry: CopyGeometry, conversion: Conversion | None = None
    ) -> tuple[list[int], list[tuple[int, int]]]:
        empty, one = (geometry._replace(num_parts=1, num_tokens=count) for count in (0, 1))
        words, more = (job_of(src, dst, each, conversion=conversion) for each in (empty, one))
        changed = enumerate(map(sub, more, words))
        return words, [(index, added) for index, added in changed if added]

    def make_jobs(
        self, source: SourceRead, blocks: Sequence[GroupBlocks], *, packing: bool
    ) -> Jobs:
        # numpy takes several times as long to make an array, to give its address, and to fill a few words
        held = [array("i", group.wire_ids) for group in blocks]
        ids = [each.buffer_info()[0] for each in held]
        num_chunks = source.num_chunks
        words = array("q", bytes(8 * _JOB_WORDS * num_chunks))
        lanes = []
        rows_word = (_SRC if packing else _DST) + _ROWS
        for span in self.chunk_spans(source, blocks, ids, packing=packing):
            job, rows = _job_of(span), span.rows
            num_parts = array("q", map(sub, rows[1:], rows))
            first, stop, step = span.chunks.start, span.chunks.stop, span.chunks.step
            one = array("q", job)
            if step == 1:
                words[first * _JOB_WORDS : stop * _JOB_WORDS] = one * len(num_parts)
            else:
                for chunk in range(first, stop, step):
                    words[chunk * _JOB_WORDS : (chunk + 1) * _JOB_WORDS] = one
            changed = [
                (_NUM_PARTS, num_parts),
                (_NBYTES, [job[_NBYTES] * count for count in num_parts]),
                (rows_word, [job[rows_word] + ROW_BYTES * row for row in rows[:-1]]),
            ]
            if (conversion := span.lane.conversion) is not None:
                lanes.append(span.lane)
                scales = [job[_SCALES] + conversion.row_bytes * row for row in rows[:-1]]
                changed.append((_SCALES, scales))
            for word, values in changed:
                place = slice(first * _JOB_WORDS + word, stop * _JOB_WORDS, step * _JOB_WORDS)
                words[place] = array("q", values)
        if not packing and source.total_bytes >= self._min_streamed_bytes:
            words[_IS_STREAMED::_JOB_WORDS] = array("q", [1]) * num_chunks
        if self.digests is not None:
            more = [nbytes + DIGEST_BYTES for nbytes in words[_NBYTES::_JOB_WORDS]]
            words[_NBYTES::_JOB_WORDS] = array("q", more)
        return Jobs(words.buffer_info()[0], None, (words, held, lanes))

    def make_read(self, read: RankRead, remote: RemotePools) -> Jobs:
        held = [array("i", group.wire_ids) for group in (*read.remote_blocks, *read.blocks)]
        ids = [each.buffer_info()[0] for each in held]
        nbytes, num_helpers = read.source.total_bytes, 0
        if self._threads is not None and nbytes >= self._min_shared_bytes:
            num_helpers = self._threads.num_idle()
        piece_bytes = PIECE_BYTES if nbytes >= MIN_SHARED_BYTES else nbytes
        lanes = []
        numbers = [0, 0, SHARED_PIECE_BYTES if num_helpers else piece_bytes, num_helpers]
        for span in self.read_spans(read, remote, ids):
            (part, stop), job = span.rows, _job_of(span)
            job[_NUM_PARTS] = stop - part
            job[_NBYTES] *= stop - part
            job[_SRC + _ROWS] += part * ROW_BYTES
            job[_DST + _ROWS] += part * ROW_BYTES
            if span.lane.conversion is not None:
                lanes.append(span.lane)
                job[_SCALES] += part * span.lane.conversion.row_bytes
            numbers += job
        numbers[0] = num_jobs = (len(numbers) - _READ_WORDS) // _JOB_WORDS
        if nbytes >= self._min_streamed_bytes:
            numbers[_READ_WORDS + _IS_STREAMED :: _JOB_WORDS] = [1] * num_jobs
        words = array("q", numbers)
        return Jobs(words.buffer_info()[0], None, (words, held, lanes))

    def prepare(self, remote: RemotePools, routes: Sequence[Route] = ()) -> None:
        if self._threads is not None or self._num_threads == 1:
            return
        try:
            self._threads = CopyThreads(self._num_threads - 1)
            self.context = self._threads.address
        except OSError as error:
            self._num_threads = 1
            logger.warning("direct reads are copied by one thread only: %s", error)

    def finish(self) -> None:
        if self._threads is not None:
            self._threads.close()


def _job_of(span: Span) -> list[int]:
    """Return the words of a job with the first part of a span."""
    job, num_tokens = [*span.lane.words], span.num_tokens
    for word, added in span.lane.words_of_a_token:
        job[word] += num_tokens * added
    for at, end, tokens in ((_SRC, span.lane.src, span.src), (_DST, span.lane.dst, span.dst)):
        if isinstance(end, Window):
            job[at + _IDS], _, job[at + _START], job[at + _SKIP] = tokens
    return job
