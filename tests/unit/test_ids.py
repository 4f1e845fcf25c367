import string

import pytest

from kvconnector.ids import new_incarnation, new_secret


@pytest.mark.parametrize("make", [new_incarnation, new_secret])
def test_random_names_have_128_bits_and_do_not_repeat(make):
    names = {make() for _ in range(100)}
    assert len(names) == 100
    assert all(len(name) == 32 and set(name) <= set(string.hexdigits) for name in names)
