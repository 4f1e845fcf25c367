from __future__ import annotations

from kvconnector.control.base import ControlLimits
from kvconnector.control.security import Insecure
from kvconnector.control.zmq import ZmqControlChannel
from tests.support.control_recorder import new_keys
from tests.support.control_suite import ControlChannelSuite
from tests.support.inproc_control import ControlFaults, ControlHub, InprocControlChannel


class TestInprocConformance(ControlChannelSuite):
    def setup_method(self) -> None:
        self.hub = ControlHub(seed=1, faults=ControlFaults())

    def teardown_method(self) -> None:
        self.hub.close()

    def open(self, limits: ControlLimits) -> InprocControlChannel:
        return self.hub.open(limits=limits, server_key="")


class TestZmqConformance(ControlChannelSuite):
    host = "127.0.0.1"

    def open(self, limits: ControlLimits) -> ZmqControlChannel:
        return ZmqControlChannel(
            bind_host=self.host,
            bind_port=0,
            advertise_host=None,
            security=Insecure(),
            limits=limits,
        )


class TestZmqIpv6Conformance(TestZmqConformance):
    host = "::1"


class TestZmqCurveConformance(ControlChannelSuite):
    def setup_method(self) -> None:
        self.keys = new_keys()

    def open(self, limits: ControlLimits) -> ZmqControlChannel:
        return ZmqControlChannel(
            bind_host="127.0.0.1",
            bind_port=0,
            advertise_host=None,
            security=self.keys,
            limits=limits,
        )
