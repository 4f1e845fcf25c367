"""Engines on one node whose pods share no namespace read directly through a volume, or say why not."""

import os
import signal
from contextlib import ExitStack

import pytest

from kvconnector.errors import ConfigError
from tests.hosts.network import descendants
from tests.hosts.pods import Pods, load

pytestmark = [pytest.mark.integration, pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(170)]


@pytest.fixture
def pods(network, tmp_path):
    with ExitStack() as stack:
        yield Pods(network, tmp_path, stack)


@pytest.mark.parametrize(
    "theirs, path",
    [
        ({}, "direct"),
        ({"folder": ""}, "packed"),
        ({"mounts": False}, "packed"),
    ],
    ids=["one volume", "the producer names none", "another volume"],
)
def test_pods_of_one_node_read_directly_through_a_shared_volume(pods, theirs, path):
    p, d = pods.start("p", "producer", **theirs), pods.start("d", "consumer")
    assert load(p, d, "r") == {path}
    assert len(list(pods.volume.iterdir())) == (path == "direct")


def test_a_pod_that_takes_the_place_of_a_killed_one_replaces_its_socket(pods):
    p, d = pods.start("p", "producer", seed=1), pods.start("d", "consumer")
    assert load(p, d, "v") == {"direct"}
    for pid in descendants(p.child.pid):
        os.kill(pid, signal.SIGKILL)
    p.kill()
    (stale,) = pods.volume.iterdir()
    assert load(pods.start("p", "producer", seed=2), d, "w") == {"direct"}
    (current,) = pods.volume.iterdir()
    assert current != stale


def test_a_missing_volume_ends_the_start(pods):
    with pytest.raises(ConfigError, match=r"paths.shared_folder must be a folder .*No such file"):
        pods.start("p", "producer", folder="/run/nowhere")
