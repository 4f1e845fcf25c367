"""Programs of one kind: the reads that the compiled loop sends, receives or copies, and their rows."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from kvconnector.session.program import Program
from kvconnector_kernels.pump import records as r

if TYPE_CHECKING:
    from kvconnector.datapath.pump.datapath import DataPath

_FIRST_CAPACITY = 16

T = TypeVar("T", bound=Program)


class Programs(Generic[T]):
    """The programs of one `kind`, a name of `records.ARRAYS`, and their rows, which grow as needed."""

    def __init__(self, path: DataPath, kind: str) -> None:
        self.path = path
        self._kind = kind
        self._fields = r.ARRAYS[kind].names or ()
        self._vacant: list[int] = []
        self.active: dict[int, T] = {}
        """The programs that have a row, by its index."""
        self._set_rows(np.zeros(_FIRST_CAPACITY, r.ARRAYS[kind]))

    def _set_rows(self, rows: npt.NDArray[np.void]) -> None:
        self._vacant += np.flatnonzero(rows["phase"] == r.VACANT).tolist()
        self.rows = rows
        self._numbers = r.numbers_of(rows)
        state = self.path.state.record
        setattr(state, self._kind, rows.ctypes.data)
        setattr(state, f"num_{self._kind}", len(rows))

    def __contains__(self, program: Program) -> bool:
        return self.active.get(program.row) is program

    def values(self, program: T) -> dict[str, int]:
        """Return the fields of a program's row by name."""
        first = program.row * len(self._fields)
        return dict(
            zip(self._fields, self._numbers[first : first + len(self._fields)], strict=True)
        )

    def set(self, program: T, name: str, value: int) -> None:
        """Change one field of a program's row."""
        self._numbers[program.row * len(self._fields) + self._fields.index(name)] = value

    def run(self, program: T, **values: int) -> None:
        """Give a program a row with these fields, and let the loop run its jobs. The other fields are zero."""
        if not self._vacant:
            self._set_rows(np.concatenate([self.rows, np.zeros_like(self.rows)]))
        index = program.row = self._vacant.pop()
        begun = {"phase": r.RUNNING, "jobs": program.jobs[0]}
        row = dict.fromkeys(self._fields, 0) | values | begun
        first = index * len(row)
        self._numbers[first : first + len(row)] = array("l", row.values())
        self.active[index] = program

    def forget(self, program: T) -> None:
        """Take the jobs of a program that is over, or will not begin, and its row if it has one."""
        index, program.row = program.row, -1
        if index >= 0:
            self._numbers[index * len(self._fields)] = r.VACANT  # its phase is the first field
            self._vacant.append(index)
            del self.active[index]
        buffer, program.jobs = program.jobs[1], None
        if buffer is not None:
            buffer.give_back()
