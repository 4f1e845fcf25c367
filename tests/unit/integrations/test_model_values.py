"""The text of a model's values: equal if the numbers are, another one if they are not."""

import math
import sys
from types import SimpleNamespace

import pytest

from kvconnector.integrations.model_values import (
    FIELDS,
    MAX_TEXT,
    config_fields,
    position_encodings,
    revision_of,
)
from kvconnector.topology.geometry import MAX_PAIRS

YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 32768}
COMMIT = "0123456789" * 4


def encoding(given=None, yarn_scale=None, **fields):
    config = SimpleNamespace(rope_parameters=given, **fields)
    return texts_of(config, yarn_scale=yarn_scale).get("", "")


def texts_of(config, **of_engine):
    """Return the texts of a configuration by kinds of layers."""
    return dict(position_encodings(config, **of_engine))


@pytest.mark.parametrize(
    "same",
    [
        {"rope_theta": 1000000},
        {"rope_type": "deepseek_yarn"},  # written into it by the code of models
        {"type": "yarn"},
        {"beta_fast": 32.0, "beta_slow": 1, "truncate": True, "partial_rotary_factor": 1.0},
        {"attention_factor": None, "mscale_all_dim": 0.0},
        {"finetuned": True, "low_freq_factor": 1.0, "short_factor": [1.0]},
        {"rope_dim": 64, "num_key_value_heads": 8},
        {"mrope_section": [8, 12, 12]},
    ],
)
def test_what_changes_no_number_changes_no_text(same):
    text = "yarn(rope_theta=1000000, factor=4, original_max_position_embeddings=32768)"
    assert encoding(YARN) == encoding(YARN | same) == text


@pytest.mark.parametrize(
    "other",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 1000000.5},
        {"rope_type": "linear"},
        {"rope_type": "llama4_scaled"},  # unknown
        {"factor": 2.0},
        {"original_max_position_embeddings": 4096},
        {"beta_fast": 16},
        {"truncate": False},
        {"attention_factor": 1.0},
        {"mscale": 0.7},
        {"partial_rotary_factor": 0.5},
        {"unknown_to_us": 1},
    ],
)
def test_what_changes_numbers_changes_the_text(other):
    assert encoding(YARN) != encoding(YARN | other)


@pytest.mark.parametrize("mscales", [{}, {"mscale": 0.7}, {"mscale": 0.7, "mscale_all_dim": 0.5}])
def test_yarns_scale_is_stated_if_it_does_not_follow_from_the_rest(mscales):
    given = YARN | mscales
    implied = 0.1 * math.log(4) + 1
    if len(mscales) > 1:
        implied = (0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1)
    plain = encoding(given)
    assert "attention_factor" not in plain
    assert encoding(given | {"attention_factor": implied}) == plain
    ignored = given | {"attention_factor": 1.0, "attn_factor": 2.0}
    assert encoding(ignored, yarn_scale=implied) == plain
    assert encoding(given | {"extrapolation_factor": 1.0}, yarn_scale=implied) == plain
    half = given | {"extrapolation_factor": 0.5}
    assert encoding(half, yarn_scale=implied) not in {plain, encoding(half)}
    read = encoding(given | {"attention_factor": 1.5})
    assert read != plain
    assert encoding(ignored, yarn_scale=1.5) == read


def test_values_outside_the_parameters_count():
    assert encoding(rope_theta=1e4) == "default(rope_theta=10000)"
    assert encoding({}, rope_theta=1e4) == encoding({"rope_theta": 10000})
    assert encoding() == encoding({}) == ""  # learned, or none
    half = "default(rope_theta=10000, partial_rotary_factor=0.5)"
    assert encoding(rope_theta=1e4, partial_rotary_factor=0.5) == half
    assert encoding(rope_theta=1e4, rotary_pct=0.5) == half
    assert encoding(rope_theta=1e4, rotary_dim=32, head_dim=64) == half
    # the model's length stands in for one that is not given, and is a factor of its own in other types
    given = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}
    assert encoding(given, max_position_embeddings=32768) == encoding(YARN)
    lengths = [{"max_position_embeddings": length} for length in (4096, 8192)]
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert encoding(dynamic, **lengths[0]) != encoding(dynamic, **lengths[1])
    assert encoding(YARN, **lengths[0]) == encoding(YARN, **lengths[1])


def test_kinds_of_layers_are_named_if_they_differ():
    local = {"rope_type": "default", "rope_theta": 10000.0}
    kinds = {"sliding_attention": local, "full_attention": YARN, "none": None}
    expected = {"full_attention": encoding(YARN), "sliding_attention": encoding(local)}
    assert texts_of(SimpleNamespace(rope_parameters=kinds)) == expected
    assert encoding({"a": local, "b": local}) == encoding(local)
    # an engine leaves out what stands beside the kinds, another one keeps it
    assert texts_of(SimpleNamespace(rope_parameters=kinds | {"rope_theta": 1e6})) == expected


def test_long_lists_are_told_apart_and_short():
    found = {
        encoding({"rope_type": "longrope", "short_factor": [1.0] * 47 + [last]})
        for last in (1, 1.0, 2.0)
    }
    assert len(found) == 2
    assert all(len(each) < 200 for each in found)
    texts = {encoding(YARN | {f"field{n}": n for n in range(count)}) for count in (100, 101)}
    assert len(texts) == 2
    assert {len(each) for each in texts} <= {*range(MAX_TEXT + 1)}


def test_fields_are_stated_by_name():
    config = SimpleNamespace(
        rms_norm_eps=1e-6,
        norm_topk_prob=True,
        sliding_window=None,
        max_position_embeddings=4096,
        no_rope_layers=[1, 0, 1],
        rope_parameters={"rope_theta": 1e4, "mrope_section": [8, 12, 12]},
    )
    assert config_fields(config) == (
        ("mrope_interleaved", "false"),
        ("mrope_section", "[8 12 12]"),
        ("no_rope_layers", "[1 0 1]"),
        ("norm_topk_prob", "true"),
        ("rms_norm_eps", "1e-06"),
    )
    whole = SimpleNamespace(**dict.fromkeys(FIELDS, 1))
    assert len(config_fields(whole)) + 3 <= MAX_PAIRS


def test_a_field_that_differs_between_layers_is_not_stated():
    class Uneven:
        rope_theta = 1e4

        @property
        def sliding_window(self):
            raise RuntimeError("a per-layer attribute")

    assert config_fields(Uneven()) == ()
    assert texts_of(Uneven()) == {"": "default(rope_theta=10000)"}


class Resolved(str):
    resolved = COMMIT


@pytest.mark.parametrize(
    "model,revision,stated",
    [
        ("org/m", Resolved("main"), f"org/m@{COMMIT}"),
        ("org/m", COMMIT, f"org/m@{COMMIT}"),
        ("org/m", "cached", f"org/m@{'f' * 40}"),
        ("org/m", None, "org/m@main"),
        ("org/m", "v1", "org/m@v1"),
        ("gpt2", None, "gpt2@main"),
        (f"/x/hub/models--org--m--2/snapshots/{COMMIT}", None, f"org/m--2@{COMMIT}"),
        (f"/x/hub/models--org--m/snapshots/{COMMIT}/", "v1", f"org/m@{COMMIT}"),
        ("/models/m", "v1", ""),
        ("./m", None, ""),
        ("s3://bucket/m", None, ""),
        ("org/m-GGUF:Q4_K_M", None, ""),
        ("", None, ""),
    ],
)
def test_a_revision_is_the_commit_if_it_is_known(model, revision, stated, monkeypatch):
    def cached(repository, file, revision):
        path = f"/x/hub/models--org--m/snapshots/{'f' * 40}/config.json"
        return path if revision == "cached" else None

    hub = SimpleNamespace(try_to_load_from_cache=cached)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert revision_of(model, revision) == stated


def test_a_folder_is_no_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "m").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert revision_of("org/m", "v1") == ""
    assert revision_of("org/n", "v1") == "org/n@v1"
