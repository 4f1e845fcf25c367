import copy
import inspect
import string

import pytest

from kvconnector import errors
from kvconnector.ids import new_incarnation, new_secret

ERRORS = [
    error
    for _, error in inspect.getmembers(errors, inspect.isclass)
    if error.__module__ == errors.__name__
]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_says_and_keeps_the_values_that_it_names(error):
    raised = error("too late", request="r", deadline_s=1.5)
    assert raised.statement == "too late [request='r', deadline_s=1.5]"
    assert str(raised) == raised.statement + (f"; {error.remedy}" if error.remedy else "")
    assert raised.context == {"request": "r", "deadline_s": 1.5}
    assert error("plain").statement == "plain"
    assert str(copy.copy(raised)) == str(raised)


@pytest.mark.parametrize("make", [new_incarnation, new_secret])
def test_random_names_have_128_bits_and_do_not_repeat(make):
    names = {make() for _ in range(100)}
    assert len(names) == 100
    assert all(len(name) == 32 and set(name) <= set(string.hexdigits) for name in names)
