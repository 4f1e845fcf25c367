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
    assert differences(used.ENTRIES + used.SPARSE + used.SPLIT + used.STAGES, sources) == []


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


@pytest.fixture
def buffers_of(utils):
    """Makes SGLang's own buffers, with our hook after what lists them."""
    import torch

    _class(utils, "KVARGS")

    def make(hidden=16, **options):
        return utils.MetadataBuffers(4, hidden, torch.float32, 16, **options)

    return make


def _rows(listed):
    from kvconnector.integrations.sglang.metadata import MetadataRows

    names = ("aux_data_ptrs", "aux_data_lens", "aux_item_lens")
    fields = dict(zip(names, listed, strict=True))
    return MetadataRows(SimpleNamespace(num_draft_entries=0, **fields), "cpu")


@pytest.mark.parametrize("selected", [0, 8], ids=["plain", "sparse attention"])
@pytest.mark.parametrize("masks", [False, True], ids=["no masks", "sampling masks"])
def test_sglangs_columns_have_their_names(buffers_of, masks, selected, monkeypatch):
    """A draft model's are apart, and the others have the order of builds that found columns by their places."""
    from kvconnector.integrations.sglang import metadata

    monkeypatch.setenv("SGLANG_ENABLE_DISAGG_SAMPLING_MASK", str(masks))
    buffers = buffers_of(96, output_dsa_topk_indices_dim=selected)
    listed = buffers.get_buf_infos()
    names = listed[0].names
    assert [getattr(buffers, name).data_ptr() for name in names] == listed[0]
    seeds = [*metadata.SEED_COLUMNS[: 4 if selected else 3]]
    assert [name for name in names if name in seeds] == seeds
    left = metadata.OWN_COLUMNS if masks else {*metadata.OWN_COLUMNS} - {*metadata.MASKS}
    own = [name for name in names if name not in seeds]
    assert own == [name for name in metadata.OWN_COLUMNS if name in left]
    rows = _rows(listed)
    assert rows.seed_bytes == sum(getattr(buffers, name)[0].nbytes for name in seeds)
    plain = _rows(buffers_of().get_buf_infos())
    assert (plain.seed_bytes, plain.own_bytes) == (0, rows.own_bytes)


def _changed(buffers, order):
    """Return what a release would list of its buffers that lists these columns in this order."""
    from kvconnector.integrations.sglang.metadata import name_columns

    tensors = [getattr(buffers, name) for name in order]
    listed = (
        [each.data_ptr() for each in tensors],
        [each.nbytes for each in tensors],
        [each[0].nbytes for each in tensors],
    )
    return name_columns(listed, buffers)


def test_a_release_may_list_its_columns_in_another_order(buffers_of):
    """With the bytes of one engine in the columns of the other."""
    prefill, decode = buffers_of(96), buffers_of(96)
    listed = prefill.get_buf_infos()
    names = listed[0].names
    for number, name in enumerate(names, 1):
        getattr(prefill, name)[1] = number
    sender, receiver = _rows(listed), _rows(_changed(decode, names[::-1]))
    sender.fill(1)
    receiver._mirror[2] = sender._mirror[1]
    assert receiver.spread(2)
    for number, name in enumerate(names, 1):
        assert (getattr(decode, name)[2] == number).all(), name


def test_a_release_with_a_column_that_nobody_has_read_is_refused(buffers_of):
    from kvconnector.errors import GeometryError

    buffers = buffers_of()
    buffers.output_draft_scores = buffers.output_ids.clone()
    names = buffers.get_buf_infos()[0].names
    for order in ([*names, "output_draft_scores"], ["output_draft_scores", *names[1:]]):
        with pytest.raises(GeometryError, match=r"unknown=.*output_draft_scores"):
            _rows(_changed(buffers, order))
    with pytest.raises(GeometryError, match=r"unknown=.*kv_checksum"):
        _rows(buffers_of(kv_checksum_enabled=True).get_buf_infos())


def test_a_release_may_lack_what_only_a_draft_model_needs(buffers_of):
    buffers = buffers_of(96)
    names = buffers.get_buf_infos()[0].names
    rows = _rows(_changed(buffers, [name for name in names if name != "output_hidden_states"]))
    assert (rows.seed_bytes, rows.own_bytes) == (0, _rows(buffers.get_buf_infos()).own_bytes)


def test_a_queue_asks_for_its_arguments_before_it_lists_columns():
    """Since our hook is there from then on."""
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue

    for queue in (DecodePreallocQueue, PrefillBootstrapQueue):
        source = inspect.getsource(queue._init_kv_manager)
        assert 0 < source.find("KVClassType.KVARGS") < source.find("get_buf_infos()")
