import logging

import pytest

from kvconnector.config import ConnectorConfig
from kvconnector.runtime.channels import open_control


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
