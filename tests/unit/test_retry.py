"""Where a router may send a failed request again: each class of error states it, each text and answer shows it."""

import importlib
import pkgutil
import re

import pytest

import kvconnector
from kvconnector import errors as e
from kvconnector.errors import KVConnectorError, Retry, retry_of
from kvconnector.integrations.sglang.transfers import error_from
from kvconnector.wire import messages as m
from kvconnector.wire import refusal_error
from minillm.http_api import ApiError
from routing import retry_of as retry_in_answer

NEEDS_ENGINE = "kvconnector.integrations"


def kinds():
    """Return all classes of errors of the package but the benchmarks', which no router sees, and which also run on the
    last release.
    """
    for module in pkgutil.walk_packages(kvconnector.__path__, "kvconnector."):
        if not module.name.startswith(NEEDS_ENGINE) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, left = [], [KVConnectorError]
    benchmarks = "kvconnector.bench"
    while left:
        kind = left.pop()
        found.append(kind)
        left += [
            each
            for each in kind.__subclasses__()
            if each.__module__.startswith("kvconnector")
            and not each.__module__.startswith(benchmarks)
        ]
    return found


def test_every_class_states_where_to_try_again():
    unstated = [kind.__name__ for kind in kinds() if not isinstance(vars(kind).get("retry"), Retry)]
    assert unstated == []


def test_mistakes_of_the_caller_are_never_tried_again():
    for kind in kinds():
        if issubclass(kind, e.LocalError):
            assert kind.retry is Retry.NEVER, kind


@pytest.mark.parametrize(
    "kind, retry",
    [
        (e.LeaseExpiredError, "same"),
        (e.UnknownTransferError, "same"),
        (e.StaleIncarnationError, "same"),
        (e.TransferAbortedError, "same"),
        (e.OfferReclaimedError, "other"),
        (e.PeerLostError, "other"),
        (e.PeerUnreachableError, "other"),
        (e.TransferTimeoutError, "other"),
        (e.IncompatiblePeerError, "other"),
        (e.ProducerNotAllowedError, "never"),
        (e.ReadRefusedError, "never"),
    ],
)
def test_what_a_router_sees(kind, retry):
    """In the text of an engine's failure, by the class's name, in minillm's answer, and in SGLang's error."""
    reason = f"{kind.__name__}: {kind('it failed', engine='p')}"
    assert re.search(r"\(retry: (\w+)\)$", reason)[1] == retry
    assert retry_of(reason) == retry
    assert retry_in_answer(500, reason.encode()) == retry
    answer = ApiError.of_load(reason).response()
    assert ApiError.of_load(reason).body["error"]["retry"] == retry
    assert retry_in_answer(answer.status, answer.body) == retry
    of_sglang = error_from(reason, room=7)
    # SGLang's engines have agreed on everything but the prompt before they read
    assert type(of_sglang) is (e.OtherPromptError if kind is e.ReadRefusedError else kind)
    assert str(of_sglang).count(f"(retry: {retry})") == 1


def test_an_unknown_class_may_be_tried_elsewhere():
    assert retry_of("SomeError: of a later release") is Retry.OTHER
    assert retry_of("") is Retry.OTHER


@pytest.mark.parametrize("refusal", m.Refusal)
def test_a_refusal_on_the_wire_says_it_by_its_class(refusal):
    assert refusal_error(refusal, "no").retry in Retry
