"""Copies on a GPU, as C functions for the loop: launches, followed by a flag in host memory that the stream sets.

See kernels/native/copy_cuda.c. Errors are `CUresult`s.
"""

from __future__ import annotations

from kvconnector_kernels.library import address_of_function, keeping

COPY = address_of_function("kvc_copy_cuda")
"""The address of the function that begins a chunk's copy, as a state takes it. Its context is a `Cuda`."""
READ = address_of_function("kvc_read_cuda")
"""The address of the function that begins a read, with all launches in one call. Its context is a `Cuda`."""

fill_jobs = keeping.kvc_fill_jobs
"""`fill_jobs(first, row_words, num_jobs, terms, rows, launch, span)`: write a span's `CudaJob`s, from the address of
the first one on, each `row_words` after the one before it.

`terms`, the address of int64 `[4, word]`: a launch of one part, and what a token further on at the source, one at the
destination, and a token more add to it. `rows`, the address of int64: chunk `i` has the parts from `rows[i]` to `rows[i
+ 1]`. `launch` and `span` are pointers to a `LaunchRecord` and a `SpanRecord`."""
