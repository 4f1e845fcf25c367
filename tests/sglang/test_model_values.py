"""What two engines state of a model's numbers, from SGLang's own configuration objects: as vLLM's state it."""

import json
import math
import os
from types import SimpleNamespace

import pytest

from kvconnector.integrations.model_values import position_encodings
from tests.sglang.sources import VARIABLE
from tests.support.model_values import CASES, SECTIONS, YARN, YARN_TEXT

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(bool(os.environ.get(VARIABLE)), reason="transformers is a stand-in"),
]
QWEN = CASES["plain"][0] | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SCALED = {"rope_theta": 1000000, "rope_type": "yarn", **YARN}


@pytest.fixture
def described(tmp_path, monkeypatch):
    """Returns what SGLang with these overrides states of a `config.json`."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.layers.rotary_embedding import factory

    from kvconnector.integrations.sglang.backend import description

    shape = SimpleNamespace(dtype="bfloat16", num_layers=6)

    # what other tests of this process have loaded
    monkeypatch.setattr(factory, "_ROPE_DICT", {})

    def describe(
        fields, folder=tmp_path, context_length=None, rotates_with_norms=False, **overrides
    ):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields))
        model = ModelConfig(
            str(folder),
            model_override_args=json.dumps(overrides),
            trust_remote_code=False,
            context_length=context_length,
        )
        return description(model, shape, "m", rotates_with_norms=rotates_with_norms)

    return describe


@pytest.mark.parametrize("name", CASES)
def test_one_text_for_every_form_of_a_position_encoding(described, name):
    fields, texts = CASES[name]
    found = described(fields)
    assert found.position_encodings == texts
    if name == "M-RoPE":
        assert {*SECTIONS} <= {*found.config}


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
def test_yarn_by_an_override_is_the_configurations_own(described, field):
    assert described(QWEN).position_encodings == CASES["plain"][1]
    assert described(QWEN, **{field: SCALED}).position_encodings == (("", YARN_TEXT),)


@pytest.mark.parametrize(
    "given, is_equal",
    [
        ({}, True),
        ({"mscale": 0.7, "mscale_all_dim": 0.5}, True),
        ({"attention_factor": 1.5}, False),  # which vLLM reads, and SGLang does not
        ({"attn_factor": 1.5}, False),  # and the reverse
        ({"mscale": 0.7, "mscale_all_dim": 0.0}, False),
        ({"extrapolation_factor": 0.5}, False),
    ],
    ids=str,
)
def test_yarn_is_stated_as_sglang_computes_it(described, monkeypatch, given, is_equal):
    """What the two engines compute is compared here by the module that SGLang makes of the values, and vLLM's rule."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    # it would look for kernels
    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.base._is_cpu", True)
    scaling = SCALED | given
    made = get_rope(64, 64, 131072, 1000000, rope_scaling=scaling)
    factor = scaling["factor"]
    both = given.get("mscale"), given.get("mscale_all_dim")
    implied = _mscale(factor, both[0]) / _mscale(factor, both[1]) if all(both) else _mscale(factor)
    of_vllm = given.get("attention_factor", implied)
    reads_more = made.extrapolation_factor != 1  # vLLM's has none
    assert (math.isclose(made.mscale, of_vllm) and not reads_more) == is_equal
    fields = SimpleNamespace(rope_parameters=scaling)
    found = described(QWEN, rope_scaling=scaling).position_encodings
    assert (found == position_encodings(fields)) == is_equal
    # two of SGLang's servers compute alike
    assert described(QWEN, rope_scaling=scaling).position_encodings == found


def _mscale(factor, mscale=1.0):
    return 0.1 * mscale * math.log(factor) + 1.0


def test_the_factors_of_longrope_are_stated(described):
    """vLLM takes one list for all prompts, SGLang for each batch, unless no prompt is that long."""
    fields = CASES["LongRoPE"][0]
    at = {length: described(fields, context_length=length) for length in (2048, 4096, 8192)}
    stated = {length: dict(each.config)["longrope factors"] for length, each in at.items()}
    assert stated == {2048: "short_factor", 4096: "short_factor", 8192: "of each batch"}


def test_other_overrides_that_change_numbers_are_stated(described):
    plain, other = described(QWEN), described(QWEN, rms_norm_eps=1e-6)
    differing = {*plain.config} ^ {*other.config}
    assert differing == {("rms_norm_eps", "1e-05"), ("rms_norm_eps", "1e-06")}
    assert described(QWEN, max_position_embeddings=8192) == plain


def test_the_commit_of_a_folder_of_the_hubs_cache_is_stated(described, tmp_path):
    commit = "0123456789" * 4
    folder = tmp_path / "models--org--m" / "snapshots" / commit
    assert described(QWEN, folder).revision == f"org/m@{commit}"
    assert described(QWEN).revision == ""


@pytest.mark.parametrize(
    "given, is_equal",
    [
        ({"factor": 2.0, "original_max_position_embeddings": 65536}, True),
        ({"factor": 4.0, "original_max_position_embeddings": 65536}, False),
        (
            {
                "factor": 2.0,
                "original_max_position_embeddings": 65536,
                "attention_factor": 1.5,
            },
            False,
        ),
    ],
    ids=str,
)
def test_a_kernel_that_rotates_by_another_rule_is_stated(described, monkeypatch, given, is_equal):
    """What SGLang's kernel for norms and rotation gets, beside what its module multiplies by."""
    from sglang.srt.layers.rotary_embedding.factory import get_rope
    from sglang.srt.models.qwen3_moe import compute_yarn_parameters

    monkeypatch.setattr("sglang.srt.layers.rotary_embedding.base._is_cpu", True)
    scaling = {"rope_theta": 1000000, "rope_type": "yarn", **given}
    config = SimpleNamespace(
        rope_parameters=scaling,
        max_position_embeddings=131072,
        hidden_size=256,
        num_attention_heads=4,
    )
    factor, _, _, attention_factor = compute_yarn_parameters(config)
    made = get_rope(64, 64, 131072, 1000000, rope_scaling=scaling)
    both = (made.scaling_factor, made.mscale), (factor, attention_factor)
    assert all(map(math.isclose, *both)) == is_equal
    lengths = {"max_position_embeddings": 131072, "rope_scaling": scaling}
    plain = described(QWEN, **lengths)
    fused = described(QWEN, rotates_with_norms=True, **lengths)
    (_, text), (_, fused_text) = plain.position_encodings[0], fused.position_encodings[0]
    assert text != fused_text
    assert "--enable-fused-qk-norm-rope" in fused_text
    assert fused == described(QWEN, rotates_with_norms=True, **lengths)
    longer = lengths | {"max_position_embeddings": 262144}
    assert fused != described(QWEN, rotates_with_norms=True, **longer)


def test_plain_rotation_is_the_same_in_every_kernel(described):
    assert described(QWEN) == described(QWEN, rotates_with_norms=True)
