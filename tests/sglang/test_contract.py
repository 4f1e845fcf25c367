"""What SGLang finds of the backend, and that it is what SGLang's own base classes ask for."""

import inspect

import pytest

pytestmark = pytest.mark.sglang
KINDS = ("KVARGS", "MANAGER", "SENDER", "RECEIVER", "BOOTSTRAP_SERVER")


@pytest.fixture(scope="module")
def utils():
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return utils


def test_the_installed_backend_is_a_choice_of_the_command_line(utils):
    from sglang.srt.arg_groups.choices import DISAGG_TRANSFER_BACKEND_CHOICES

    assert DISAGG_TRANSFER_BACKEND_CHOICES.count("kvconnector") == 1
    assert utils.TransferBackend("kvconnector").value == "kvconnector"


def test_the_others_stay_what_they_were(utils):
    names = {each.value for each in utils.TransferBackend}
    assert {"mooncake", "nixl", "ascend", "mori", "fake", "kvconnector"} <= names
    fake = utils.get_kv_class(utils.TransferBackend("fake"), utils.KVClassType.SENDER)
    assert fake.__module__.startswith("sglang.")


@pytest.mark.parametrize("kind", KINDS)
def test_each_class_is_complete(utils, kind):
    backend = utils.TransferBackend("kvconnector")
    found = utils.get_kv_class(backend, utils.KVClassType[kind])
    assert not inspect.isabstract(found)
    if kind != "KVARGS":
        assert found.__module__ == "kvconnector.integrations.sglang.backend"


@pytest.mark.parametrize("kind", ["SENDER", "RECEIVER"])
def test_methods_take_what_those_of_sglang_take(utils, kind):
    kind = utils.KVClassType[kind]
    ours = utils.get_kv_class(utils.TransferBackend("kvconnector"), kind)
    fake = utils.get_kv_class(utils.TransferBackend("fake"), kind)
    for name, method in inspect.getmembers(fake, inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        parameters = inspect.signature(getattr(ours, name)).parameters.values()
        has_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
        missing = inspect.signature(method).parameters.keys() - {each.name for each in parameters}
        assert has_any or not missing, f"{name} lacks {missing}"
