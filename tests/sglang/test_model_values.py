"""What two engines state of a model's numbers, from SGLang's own configuration objects: as vLLM's state it."""

import json
import os
from types import SimpleNamespace

import pytest

from tests.sglang.sources import VARIABLE
from tests.support.model_values import CASES, SECTIONS, YARN, YARN_TEXT

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(bool(os.environ.get(VARIABLE)), reason="transformers is a stand-in"),
]
QWEN = CASES["plain"][0] | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
SCALED = {"rope_theta": 1000000, "rope_type": "yarn", **YARN}


@pytest.fixture
def described(tmp_path):
    """Returns what SGLang with these overrides states of a `config.json`."""
    from sglang.srt.configs.model_config import ModelConfig

    from kvconnector.integrations.sglang.backend import description

    shape = SimpleNamespace(dtype="bfloat16", num_layers=6)

    def describe(fields, folder=tmp_path, **overrides):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(fields))
        model = ModelConfig(
            str(folder), model_override_args=json.dumps(overrides), trust_remote_code=False
        )
        return description(model, shape, "m")

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
