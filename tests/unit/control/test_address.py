"""Host names that no name server knows are refused with their address, not when a connection's time is up."""

import pytest

from kvconnector.control.address import parse_address
from kvconnector.errors import ConfigError

LONGEST = ".".join(["x" * 63] * 3 + ["y" * 61])


@pytest.mark.parametrize("host", [LONGEST, f"{LONGEST}.", "x" * 63, "a_b.svc", "bücher.example"])
def test_names_of_any_permitted_length_are_taken(host):
    assert parse_address(f"tcp://{host}:7").host == host


@pytest.mark.parametrize(
    "host, text",
    [
        ("x" * 3000, "more than 253"),
        (f"{LONGEST}y", "more than 253"),
        (".".join(["x" * 50] * 5), "more than 253"),
        ("x" * 64, "label"),
        ("a..b", "label"),
        (".b", "label"),
        ("ü" * 63, "label"),
    ],
)
def test_other_names_are_refused_with_the_reason(host, text):
    with pytest.raises(ConfigError, match=text) as refused:
        parse_address(f"tcp://{host}:7")
    assert len(str(refused.value)) < 500
