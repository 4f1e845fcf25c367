import logging

import pytest

from kvconnector.config import ConnectorConfig
from kvconnector.runtime.channels import control_limits, open_control


@pytest.mark.parametrize("setting", ["insecure", "insecure_network"])
def test_an_open_network_is_warned_of(setting, caplog):
    everywhere = "0.0.0.0"  # noqa: S104  the point of the setting
    host = "127.0.0.1" if setting == "insecure" else everywhere
    control = {"host": host, "advertise_host": "127.0.0.1", setting: True}
    config = ConnectorConfig.from_mapping({"engine_id": "e", "control": control})
    with caplog.at_level(logging.WARNING):
        channel = open_control(config, 0)
    try:
        assert channel.address.startswith("tcp://127.0.0.1:")
    finally:
        channel.close()
    assert ("can read and forge" in caplog.text) == (setting == "insecure_network")


@pytest.mark.parametrize("timeout_s", [0.5, 2.0, 15.0, 600.0])
def test_a_host_that_does_not_answer_is_given_up_within_the_peer_s_timeout(timeout_s):
    """Also while it is greeted, which may otherwise take `hello_timeout_s`, the first time three of these."""
    peer = {"timeout_s": timeout_s, "heartbeat_interval_s": 0.9 * timeout_s, "hello_timeout_s": 10}
    limits = control_limits(
        ConnectorConfig.from_mapping(
            {
                "engine_id": "e",
                "control": {"insecure": True},
                "peer": {**peer, "idle_timeout_s": 1000},
                "lease": {"duration_s": 1000},
            }
        )
    )
    assert 0 < limits.connect_timeout_s <= timeout_s
    assert limits.heartbeat_interval_s + limits.heartbeat_timeout_s <= timeout_s
    assert limits.heartbeat_interval_s < limits.heartbeat_timeout_s
