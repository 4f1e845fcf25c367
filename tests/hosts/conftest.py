"""Hosts for tests; where they cannot be made the tests are skipped and say why."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.network import Network, missing


@pytest.fixture(scope="session")
def hosts_available() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def network(hosts_available: None) -> Iterator[Network]:
    """A network of the test's own."""
    with Network() as network:
        yield network
