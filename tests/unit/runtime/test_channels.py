import logging

import pytest

from kvconnector.config import ConnectorConfig
from kvconnector.runtime.channels import control_limits, open_control


@pytest.mark.parametrize("setting", ["insecure", "insecure_network"])
def test_an_insecure_network_logs_a_warning(setting, caplog):
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
def test_control_timeouts_stay_within_the_peers_timeout(timeout_s):
    """Also during the greeting, which may otherwise take `hello_timeout_s`, or three times as long at first."""
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
    assert 0 < limits.host_timeout_s <= timeout_s
