"""SGLang finds the backend, which has everything that SGLang's base classes and queues use."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvconnector.integrations.contract import Sources, differences
from kvconnector.integrations.sglang import used

pytestmark = pytest.mark.sglang
OWNERS = {"disagg_kv_sender": "SENDER", "kv_receiver": "RECEIVER", "kv_manager": "MANAGER"}
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


def test_sglang_has_all_that_is_used_of_it_and_uses_nothing_that_is_missing():
    import sglang

    sources = Sources(Path(sglang.__path__[0]))
    assert differences(used.ENTRIES + used.SPARSE, sources) == []


@pytest.mark.parametrize("owner, kind", OWNERS.items())
def test_each_name_that_sglang_uses_of_us_is_there(utils, owner, kind):
    """The table looks for names in sources; here the classes are asked, so that it cannot believe in too many."""
    import sglang

    (entry,) = [each for each in used.ENTRIES if getattr(each, "owner", "") == owner]
    sources = Sources(Path(sglang.__path__[0]))
    asked = [*entry.uses(sources)]
    assert asked
    ours = [each for each in _class(utils, kind).__mro__ if "kvconnector" in each.__module__]
    source = "".join(map(inspect.getsource, ours))
    missing = [
        name
        for name in asked
        if name not in entry.unneeded
        and not hasattr(ours[0], name)
        and not re.search(rf"\bself\.{name}\b", source)
    ]
    assert not missing


def test_the_hook_gets_its_arguments():
    from sglang.srt.disaggregation.decode import DecodePreallocQueue

    from kvconnector.integrations.sglang.backend import SEND_METADATA

    assert SEND_METADATA.endswith("decode.DecodePreallocQueue._send_kv_metadata")
    parameters = [*inspect.signature(DecodePreallocQueue._send_kv_metadata).parameters]
    assert parameters[:3] == ["self", "decode_req", "kv_indices"]


@pytest.mark.parametrize("selected", [0, 8], ids=["plain", "sparse attention"])
@pytest.mark.parametrize("masks", [False, True], ids=["no masks", "sampling masks"])
def test_a_draft_models_columns_are_those_that_only_speculation_uses(
    utils, masks, selected, monkeypatch
):
    import torch

    from kvconnector.integrations.sglang.metadata import MetadataRows, _seed_columns

    monkeypatch.setenv("SGLANG_ENABLE_DISAGG_SAMPLING_MASK", str(masks))
    options = {"output_dsa_topk_indices_dim": selected}
    buffers = utils.MetadataBuffers(4, 96, torch.float32, 16, **options)
    pointers, lengths, widths = buffers.get_buf_infos()
    seeds = [buffers.output_topk_p, buffers.output_topk_index, buffers.output_hidden_states]
    seeds += [buffers.output_dsa_topk_indices] if selected else []
    assert [pointers[at] for at in _seed_columns(widths)] == [each.data_ptr() for each in seeds]
    listed = {"aux_data_ptrs": pointers, "aux_data_lens": lengths, "aux_item_lens": widths}
    rows = MetadataRows(SimpleNamespace(num_draft_entries=0, **listed), "cpu")
    assert rows.seed_bytes == sum(each[0].nbytes for each in seeds)
    without = utils.MetadataBuffers(4, 16, torch.float32, 16)
    pointers, lengths, widths = without.get_buf_infos()
    listed = {"aux_data_ptrs": pointers, "aux_data_lens": lengths, "aux_item_lens": widths}
    plain = MetadataRows(SimpleNamespace(num_draft_entries=0, **listed), "cpu")
    assert (plain.seed_bytes, plain.own_bytes) == (0, rows.own_bytes)
