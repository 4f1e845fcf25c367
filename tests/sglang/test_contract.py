"""SGLang finds the backend, which has everything that SGLang's base classes and queues use."""

import ast
import inspect
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.sglang
CALLERS = ("disaggregation/prefill.py", "disaggregation/decode.py", "managers/scheduler.py")
OWNERS = {"disagg_kv_sender": "SENDER", "kv_receiver": "RECEIVER", "kv_manager": "MANAGER"}
OF_REFUSED = {
    "_ensure_prefill_recompute_executor": "prompts computed again",
    "_staging_handler": "the staging buffer",
    "set_kv_buffer_tensors": "the staging buffer",
    "transfer_infos": "prefill context parallelism",
    "abort_notified": "pages kept after an abort",
    "bootstrap_infos": "pages kept after an abort",
    "conclude_state": "allocation once a prompt is computed",
    "try_ensure_parallel_info": "prefill engines of which nothing is known",
}
"""Names that SGLang uses only with what does not occur here, or that a backend must declare."""
ASKING = {"getattr", "hasattr"}
KINDS = ("KVARGS", "MANAGER", "SENDER", "RECEIVER", "BOOTSTRAP_SERVER")


@pytest.fixture(scope="module")
def utils():
    from sglang.srt.disaggregation import utils
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return utils


def test_the_installed_backend_is_a_choice_of_the_command_line(utils):
    from sglang.srt.arg_groups import choices

    assert choices.DISAGG_TRANSFER_BACKEND_CHOICES.count("kvconnector") == 1
    assert utils.TransferBackend("kvconnector").value == "kvconnector"


def test_the_other_backends_stay(utils):
    names = {each.value for each in utils.TransferBackend}
    assert {"mooncake", "nixl", "ascend", "mori", "fake", "kvconnector"} <= names
    assert _class(utils, "SENDER", "fake").__module__.startswith("sglang.")


def _class(utils, kind, backend="kvconnector"):
    return utils.get_kv_class(utils.TransferBackend(backend), utils.KVClassType[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_each_backend_class_is_complete(utils, kind):
    found = _class(utils, kind)
    assert not inspect.isabstract(found)
    if kind != "KVARGS":
        assert found.__module__ == "kvconnector.integrations.sglang.backend"


@pytest.mark.parametrize("kind", ["SENDER", "RECEIVER"])
def test_methods_take_what_those_of_sglang_take(utils, kind):
    ours = _class(utils, kind)
    for name, method in inspect.getmembers(_class(utils, kind, "fake"), inspect.isfunction):
        if name.startswith("_") and name != "__init__":
            continue
        parameters = inspect.signature(getattr(ours, name)).parameters.values()
        has_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
        missing = inspect.signature(method).parameters.keys() - {each.name for each in parameters}
        assert has_any or not missing, f"{name} lacks {missing}"


def test_the_backend_has_everything_that_sglang_uses(utils):
    import sglang

    used, asked_for = set(), set()
    for name in CALLERS:
        tree = ast.parse(Path(sglang.__path__[0], "srt", name).read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                used.add((OWNERS.get(node.value.attr), node.attr))
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ASKING:
                asked_for.add(getattr(node.args[1], "value", ""))
    missing = set()
    for kind, name in used:
        if kind is None or name in asked_for or name in OF_REFUSED:
            continue
        ours = [each for each in _class(utils, kind).__mro__ if "kvconnector" in each.__module__]
        source = "".join(map(inspect.getsource, ours))
        if not hasattr(ours[0], name) and not re.search(rf"\bself\.{name}\b", source):
            missing.add((kind, name))
    assert not missing


def test_the_hook_gets_its_arguments():
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    from kvconnector.integrations.sglang.backend import SEND_METADATA

    assert SEND_METADATA.endswith("decode.DecodePreallocQueue._send_kv_metadata")
    parameters = [*inspect.signature(DecodePreallocQueue._send_kv_metadata).parameters]
    assert parameters[:3] == ["self", "decode_req", "kv_indices"]
