"""Programs of one kind: the reads that the compiled loop sends, receives or copies, and their rows."""

from __future__ import annotations

from array import array
from typing import Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvconnector.datapath.pump.copies import Jobs
from kvconnector.datapath.pump.loop import Loop
from kvconnector.errors import KVConnectorError
from kvconnector_kernels.pump import records as r

_FIRST_CAPACITY = 16


class Program(msgspec.Struct, eq=False, kw_only=True):
    """A read as the data path runs it: its `row` in the compiled loop (-1 if it has none) and that row's `jobs`.
    `error` says why it ends early if the loop does not know.
    """

    row: int = -1
    jobs: Jobs | None = None
    error: KVConnectorError | None = None


T = TypeVar("T", bound=Program)


class Programs(Generic[T]):
    """The programs of one `kind`, a name of `records.ARRAYS`, and their rows, which grow as needed."""

    def __init__(self, loop: Loop, kind: str) -> None:
        self.loop = loop
        self._kind = kind
        self._fields = r.ARRAYS[kind].names or ()
        self._index = {name: index for index, name in enumerate(self._fields)}
        self._zeros = array("l", bytes(8 * len(self._fields)))
        self._vacant: list[int] = []
        self.active: dict[int, T] = {}
        """The programs that have a row, by its index."""
        self._set_rows(np.zeros(_FIRST_CAPACITY, r.ARRAYS[kind]))

    def _set_rows(self, rows: npt.NDArray[np.void]) -> None:
        self._vacant += np.flatnonzero(rows["phase"] == r.VACANT).tolist()
        self.rows = rows
        self._numbers = r.numbers_of(rows)
        state = self.loop.state.record
        setattr(state, self._kind, rows.ctypes.data)
        setattr(state, f"num_{self._kind}", len(rows))

    def values(self, program: T) -> dict[str, int]:
        """Return the fields of a program's row by name."""
        first = program.row * len(self._fields)
        return dict(
            zip(self._fields, self._numbers[first : first + len(self._fields)], strict=True)
        )

    def set(self, program: T, name: str, value: int) -> None:
        """Change one field of a program's row."""
        self._numbers[program.row * len(self._fields) + self._index[name]] = value

    def run(self, program: T, jobs: Jobs, **values: int) -> None:
        """Give a program a row with these fields, and let the loop run the jobs. The other fields are zero."""
        if not self._vacant:
            self._set_rows(np.concatenate([self.rows, np.zeros_like(self.rows)]))
        index = program.row = self._vacant.pop()
        program.jobs = jobs
        row, places = self._zeros[:], self._index
        row[places["phase"]], row[places["jobs"]] = r.RUNNING, jobs.address
        for name, value in values.items():
            row[places[name]] = value
        first = index * len(row)
        self._numbers[first : first + len(row)] = row
        self.active[index] = program

    def forget(self, program: T) -> None:
        """Take the jobs of a program that is over, or will not begin, and its row, if it has any."""
        index, program.row = program.row, -1
        if index >= 0:
            self._numbers[index * len(self._fields)] = r.VACANT  # its phase is the first field
            self._vacant.append(index)
            del self.active[index]
        jobs, program.jobs = program.jobs, None
        if jobs is not None and jobs.buffer is not None:
            jobs.buffer.give_back()
