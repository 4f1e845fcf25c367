"""Which addresses a list of producers allows."""

import pytest

from kvconnector.allowed_producers import AllowedProducers

LISTED = "10.2.0.0/16, fd00::/8,192.0.2.7, 192.0.2.8:5557, [2001:db8::1]:5557, 2001:db8::2, Prefill-0, *.prefill.svc:9"


@pytest.mark.parametrize(
    "host, port",
    [
        ("10.2.255.1", 1),
        ("::ffff:10.2.0.1", 1),
        ("fd12::1", 65535),
        ("192.0.2.7", 80),
        ("192.0.2.8", 5557),
        ("2001:db8::1", 5557),
        ("2001:db8:0::1", 5557),
        ("2001:db8::2", 1),
        ("prefill-0", 1),
        ("PREFILL-0.", 1),
        ("a.prefill.svc", 9),
    ],
)
def test_listed_producers_are_allowed(host, port):
    assert AllowedProducers(LISTED).allows(host, port)


@pytest.mark.parametrize(
    "host, port",
    [
        ("10.3.0.1", 1),
        ("::ffff:10.3.0.1", 1),
        ("fe80::1", 1),
        ("192.0.2.8", 25),
        ("192.0.2.70", 80),
        ("2001:db8::1", 25),
        ("prefill-01", 1),
        ("10.2.0.1.evil.example", 1),
        ("prefill.svc", 9),
        ("aprefill.svc", 9),
        ("a.prefill.svc", 10),
        ("a.prefill.svc.evil", 9),
        ("", 9),
    ],
)
def test_others_are_not(host, port):
    assert not AllowedProducers(LISTED).allows(host, port)


@pytest.mark.parametrize("listed", ["", " ", ","])
def test_an_empty_list_allows_all(listed):
    assert AllowedProducers(listed).allows("203.0.113.9", 25)
