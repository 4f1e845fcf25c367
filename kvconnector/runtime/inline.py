"""The engine's thread in the place of the driver's: acquiring the data path, driving, and giving it back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvconnector.runtime.cuda_context import CudaContext
from kvconnector.runtime.driver import Driver

if TYPE_CHECKING:
    from kvconnector.datapath.pump.datapath import DataPath


class InlineProgress:
    """Lets any thread drive for a moment. `fail` takes what broke the driver, which then drives nothing more.

    The data path is given back whatever happens. A signal's handler runs between any two instructions of the main
    thread, and may raise there: so nothing here depends on having noticed that the data path was acquired, and giving
    it back is tried twice.
    """

    def __init__(
        self, datapath: DataPath, context: CudaContext, fail: Callable[[BaseException], None]
    ) -> None:
        self._datapath = datapath
        self._context = context
        self._fail = fail

    def run(self, driver: Driver, limit_s: float, drive: Callable[[Driver], None]) -> bool:
        """Call `drive` as the owner of the data path. Returns False if it could not be acquired within `limit_s`."""
        machine = self._datapath.machine
        try:
            try:
                if not machine.try_acquire(limit_s):
                    return False
                self._drive(driver, drive)
            finally:
                if machine.is_ours:
                    self._give_back(driver)
        except BaseException:
            if machine.is_ours:  # an interrupt came just before, or within
                self._give_back(driver)
            raise
        return True

    def _drive(self, driver: Driver, drive: Callable[[Driver], None]) -> None:
        try:
            previous = self._context.enter()
            try:
                drive(driver)
            finally:
                self._context.leave(previous)
        except Exception as error:
            self._fail(error)
        except BaseException as error:
            # whatever ends the engine's thread may have come in the middle of anything
            self._fail(error)
            raise

    def _give_back(self, driver: Driver) -> None:
        try:
            driver.end_inline()
        except Exception as error:
            self._fail(error)
            # nobody could own it any more, not even to close
            self._datapath.release(0.0)
