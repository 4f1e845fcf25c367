"""What two engines state of a model's numbers, from vLLM's own configuration objects."""

import copy
import json

import msgspec
import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models import registry

from kvconnector.errors import IncompatiblePeerError
from kvconnector.ids import Rank
from kvconnector.integrations.model_values import ORIGINAL_LENGTH
from kvconnector.integrations.vllm.settings import model_description
from kvconnector.topology import TpKVTopology
from tests.support.model_configs import config
from tests.support.model_values import CASES, LLAMA, SECTIONS, YARN, YARN_TEXT
from tests.unit.topologies import engine, relisted

pytestmark = pytest.mark.vllm

QWEN = CASES["plain"][0] | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
PLAIN = {"rope_theta": 1000000, "rope_type": "default"}
SCALED = {"rope_theta": 1000000, "rope_type": "yarn", **YARN}


@pytest.fixture
def described(tmp_path, monkeypatch):
    """Returns what vLLM with these options states of a `config.json`."""
    # vLLM looks at each model's class in a process of its own, which imports all of vLLM again, to keep CUDA untouched
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda call: call())

    def describe(fields, folder=tmp_path, fitted=None, **options):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields))
        arguments = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True}
        args = EngineArgs(model=str(folder), **arguments, **options)
        made = args.create_engine_config()
        made.model_config.max_model_len = fitted or made.model_config.max_model_len
        return model_description(made, "m")

    return describe


def refused(ours, theirs):
    """Return the values in which engines with these descriptions disagree; none if they exchange blocks."""
    one, other = (
        relisted(engine(), engine().ranks, engine_id=name, model=model)
        for name, model in (("ours", ours), ("theirs", theirs))
    )
    try:
        TpKVTopology(one, Rank(0, 0)).check_compatible(other)
    except IncompatiblePeerError as error:
        return error.context
    return {}


@pytest.mark.parametrize("name", CASES)
def test_one_text_for_every_form_of_a_position_encoding(described, name):
    fields, texts = CASES[name]
    found = described(fields)
    assert found.position_encodings == texts
    if name == "M-RoPE":
        assert {*SECTIONS} <= {*found.config}
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=type(found)) == found


def test_yarn_on_one_side_alone_is_refused(described):
    prefill = described(QWEN, hf_overrides={"rope_parameters": SCALED})
    decode = described(QWEN, hf_overrides={"rope_parameters": PLAIN})
    assert refused(prefill, decode) == {
        "position_encoding": {"ours": YARN_TEXT, "theirs": "default(rope_theta=1000000)"}
    }
    written = CASES["YaRN, oldest form"][0]
    assert refused(prefill, described(written)) == {}


@pytest.mark.parametrize(
    "overrides,names",
    [
        ({"rope_parameters": {**PLAIN, "rope_theta": 5e5}}, {"position_encoding"}),
        ({"rope_parameters": {**SCALED, "factor": 2.0}}, {"position_encoding"}),
        ({"rms_norm_eps": 1e-6}, {"config.rms_norm_eps"}),
        ({"max_position_embeddings": 8192}, set()),
        ({"architectures": ["Qwen3ForCausalLM"]}, set()),
    ],
)
def test_overrides_that_change_numbers_are_refused_by_name(described, overrides, names):
    plain = described(QWEN, hf_overrides={"rope_parameters": PLAIN})
    other = described(QWEN, hf_overrides={"rope_parameters": PLAIN} | overrides)
    assert refused(plain, other).keys() == names


def test_other_lengths_are_refused_only_with_longrope(described):
    """vLLM then takes the long factors for all prompts if one may be longer than the model's original length."""
    assert refused(described(QWEN, max_model_len=1024), described(QWEN, max_model_len=4096)) == {}
    fields = CASES["LongRoPE"][0]
    at = {length: described(fields, max_model_len=length) for length in (2048, 4096, 8192)}
    assert refused(at[2048], at[4096]) == {}
    found = refused(at[4096], at[8192])
    assert found == {"config.longrope factors": {"ours": "short_factor", "theirs": "long_factor"}}


@pytest.mark.parametrize("inside", [True, False])
def test_a_length_fitted_to_the_memory_changes_no_factors(described, inside):
    """vLLM builds the model for the length before that, and shortens it when it knows how much memory is left."""
    fields = CASES["LongRoPE"][0]
    if inside:  # transformers' class of Phi-3 has a default for the length outside
        scaling = fields["rope_scaling"] | {ORIGINAL_LENGTH: fields[ORIGINAL_LENGTH]}
        fields = config(**LLAMA, max_position_embeddings=8192, rope_scaling=scaling)
    found = dict(described(fields, max_model_len=-1, fitted=1024).config)
    assert found["longrope factors"] == ("long_factor" if inside else "short_factor")


def test_a_folder_has_no_revision(described):
    assert described(config(**LLAMA), revision="main").revision == ""


def test_the_commit_of_a_folder_of_the_hubs_cache_is_stated(described, tmp_path):
    commit = "0123456789" * 4
    folder = tmp_path / "models--org--m" / "snapshots" / commit
    assert described(config(**LLAMA), folder).revision == f"org/m@{commit}"


def test_the_commit_that_vllm_resolved_reaches_its_workers(described, tmp_path):
    """The configuration is pickled on the way to them, which takes an object apart as a copy does."""
    hub = pytest.importorskip("huggingface_hub")
    resolved = hub.ResolvedRevision("0123456789" * 4, "v1", "org/m")
    described(config(**LLAMA))
    args = EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
    made = args.create_engine_config()
    made.model_config.model, made.model_config.revision = "org/m", resolved
    found = model_description(copy.deepcopy(made), "m")
    assert found.revision == f"org/m@{resolved.resolved}"
