"""Hosts for tests; if they cannot be made, the tests are skipped with the reason."""

import pytest

from tests.hosts.network import Network, missing


@pytest.fixture(scope="session")
def hosts_available():
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def network(hosts_available):
    """A network of the test's own."""
    with Network() as network:
        yield network
