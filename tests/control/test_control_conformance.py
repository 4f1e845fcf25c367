from kvconnector.control.security import Security
from tests.control.test_control_zmq import OURS, open_channel
from tests.support.control_suite import ControlChannelSuite


class TestZmqConformance(ControlChannelSuite):
    host = "127.0.0.1"
    security: Security = None

    def open(self, limits):
        return open_channel(self.security, limits, self.host)


class TestZmqIpv6Conformance(TestZmqConformance):
    host = "::1"


class TestZmqCurveConformance(TestZmqConformance):
    security = OURS
