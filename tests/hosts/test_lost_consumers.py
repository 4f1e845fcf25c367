"""A producer's transport outlives consumers on other hosts that are given up, or die, in the middle of a transfer."""

import signal

import pytest

from tests.hosts.network import HostProcess
from tests.support.transport_suite import Ledger, Worker, exchange
from tests.transport.remote import RemoteTransport

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.timeout(110)]

SETTINGS = {"tcp_segment_bytes": 512 << 10}
NUM_MESSAGES, MESSAGE_BYTES, REPEATS = 32, 1 << 20, 2
QUIET_WAKEUPS = 500
"""Wake-ups in half a second. An endpoint that UCX cannot finish causes thousands."""


def given_up_while_stopped(consumer, producer, to):
    consumer.signal(signal.SIGSTOP)
    producer.call("drive", 0.1)
    producer.disconnect(to)
    producer.call("drive", 0.1)
    consumer.signal(signal.SIGCONT)
    producer.call("drive", 0.2)


def killed_after_it_was_given_up(consumer, producer, to):
    given_up_while_stopped(consumer, producer, to)
    consumer.signal(signal.SIGKILL)


def killed_before_it_was_given_up(consumer, producer, to):
    consumer.signal(signal.SIGKILL)
    producer.disconnect(to)


class Consumer:
    """A transport on another host that is connected to the producer and receives what it sends."""

    def __init__(self, host, producer):
        self.transport = RemoteTransport(SETTINGS, host.command([]))
        self.process = HostProcess(self.transport.child)
        self.endpoint = producer.connect(self.transport.address)
        back = self.transport.connect(producer.address)
        there = Worker(self.transport, back, self.transport.allocate)
        here = Worker(producer, self.endpoint, producer.allocate)
        exchange(Ledger(producer, self.transport), here, there, 1000)

    def end(self):
        self.process.signal(signal.SIGCONT)
        self.process.signal(signal.SIGKILL)
        self.transport.kill()
        self.transport.release()


@pytest.mark.parametrize(
    "fault", [given_up_while_stopped, killed_after_it_was_given_up, killed_before_it_was_given_up]
)
def test_a_consumer_ends_in_the_middle_of_a_transfer(network, fault):
    here, there = network.host("here"), network.host("there")
    producer = RemoteTransport(SETTINGS, here.command([]))
    messages = [producer.allocate(MESSAGE_BYTES) for _ in range(NUM_MESSAGES)]
    here.limit(100)
    for _ in range(REPEATS):
        consumer = Consumer(there, producer)
        for tag, message in enumerate(messages, 1):
            consumer.transport.recv(tag, consumer.transport.allocate(MESSAGE_BYTES).buffer)
            producer.send(consumer.endpoint, tag, message.buffer)
        consumer.transport.begin("drive", 60)
        assert producer.call("drive", 0.3) < NUM_MESSAGES
        fault(consumer.process, producer, consumer.endpoint)
        producer.call("drive", 0.2)
        assert producer.call("wakeups", 0.5) < QUIET_WAKEUPS
        consumer.end()
    Consumer(there, producer).end()
    producer.close()
    producer.release()
