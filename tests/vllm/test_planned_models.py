"""What `kvconnector plan` reads from a `config.json` is what vLLM's own layers cache, layer by layer.

vLLM builds each model of `tests/support/model_configs.py` without weights, in a process of its own: as published and as
transformers saves it again, as one rank and as others, and with an fp8 cache.
"""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import vllm

from kvconnector.bench.shapes import PACKED, EngineShape, rank_geometry
from kvconnector.cli.model_config import read_model_config
from kvconnector.ids import Rank
from kvconnector.integrations.vllm.parts import CUT_STATES
from tests.support.model_configs import FAMILIES
from tests.support.model_values import CASES

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.timeout(280)]
ROOT = Path(__file__).parents[2]
ENCODED = ("DeepSeek V3", "YaRN, old form", "Gemma 3, old form", "LongRoPE")
SERVED = {
    "as published": {},
    "rank 1 of 2": {"tp": 2, "rank": 1},
    "rank 7 of 8": {"tp": 8, "rank": 7},  # K and V of two heads are replicated
    "fp8": {"cache_dtype": "fp8"},
}
SPARSE = ("deepseek v3.2", "glm 5")
"""Latents with an indexer beside them."""
DRAFTING = (
    *("deepseek v3", "deepseek v3.2", "glm 4.5", "glm 4.7 flash", "glm 5", "kimi k3", "mimo"),
    *("qwen 3.5", "qwen 3.5 moe"),
)
"""Families whose draft layers are planned and can be built here."""
UNNUMBERED = ("falcon h1", "zamba 2")
"""Of these vLLM counts attentions and states in another order than layers."""


@pytest.fixture(scope="module")
def vllms():
    """What vLLM's layers cache, by family and how it is served, the configurations that transformers saves, and models'
    position encodings before and after they were built.
    """
    # saved before vLLM puts classes of its own in place of transformers'
    asked = {
        f"{family}: saved": {"config": config, "is_saved": True}
        for family, config in FAMILIES.items()
    }
    asked |= {f"{name}: as published": {"config": CASES[name][0]} for name in ENCODED}
    for family in DRAFTING:
        asked[f"{family}: draft"] = {"config": FAMILIES[family], "draft_tokens": 2}
    for family in SPARSE:
        asked[f"{family}: packed"] = {"config": FAMILIES[family], "cache_dtype": PACKED}
    for family, config in FAMILIES.items():
        for served, more in SERVED.items():
            asked[f"{family}: {served}"] = {"config": config, **more}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.layer_specs"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    return SimpleNamespace(
        of=lambda family, served: found(answers[f"{family}: {served}"], family),
        saved=lambda family: answers[f"{family}: saved"],
        encodings=lambda family: answers[f"{family}: as published: encodings"],
        states=lambda family, served: answers[f"{family}: {served}: states"],
    )


def found(answer, family):
    """Return an answer of `layer_specs`, without layers' numbers where vLLM has others."""
    assert isinstance(answer, list), answer
    return sorted(each for _, *each in answer) if family in UNNUMBERED else answer


def planned(config, folder, family, *, tp=1, rank=0, cache_dtype="", drafts=False):
    """Return what each layer caches as `layer_specs` says it."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    model = read_model_config(path)
    model = model.with_drafts() if drafts else model
    dtype = {"fp8": "float8_e4m3fn"}.get(cache_dtype, cache_dtype)
    geometry = rank_geometry(model, EngineShape(tp=tp, dtype=dtype), Rank(0, rank))
    is_compressed = config["model_type"] == "deepseek_v4"
    per_layer = 2 if config["model_type"] == "longcat_flash" else 1
    layers = sorted(
        [
            layer // per_layer,
            # vLLM keeps a compressor's last tokens as a window; the next row needs a chunk of it
            "window" if is_compressed and group.keeps == "chunk" else group.keeps,
            group.extent_tokens,
            sum(
                (part.head_stop - part.head_start) * part.head_dim * part.item_size_bytes
                for part in held.parts
            )
            // group.row_tokens,
        ]
        for group, held in zip(model.layer_groups, geometry.groups, strict=True)
        for layer in group.layers
    )
    return found(layers, family)


@pytest.mark.parametrize("served", SERVED)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_a_model_is_what_vllm_s_layers_cache(vllms, tmp_path, family, served):
    if family == "qwen3-next" and vllm.__version__.startswith("0.31"):
        pytest.skip("vLLM 0.31 makes every fourth layer one of attention, whatever the interval")
    if family.startswith("falcon ") and "h1" not in family and served == "fp8":
        pytest.skip("vLLM's Falcon keeps K and V in the model's type, whatever the cache's")
    if family == "deepseek v4" and served == "fp8":
        pytest.skip("its latents are in fp8 always")
    expected = vllms.of(family, served)
    assert planned(FAMILIES[family], tmp_path, family, **SERVED[served]) == expected


@pytest.mark.parametrize("family", DRAFTING)
def test_draft_layers_are_planned(vllms, tmp_path, family):
    """Draft layers are numbered on from the model's, or from 0 again."""
    expected = sorted(each for _, *each in vllms.of(family, "draft"))
    found = planned(FAMILIES[family], tmp_path, family, drafts=True)
    assert sorted(each for _, *each in found) == expected


@pytest.mark.parametrize("served, drafts", [("as published", 0), ("rank 7 of 8", 0), ("draft", 2)])
def test_registration_finds_the_inputs_of_each_convolution(vllms, served, drafts):
    """Of vLLM's own layers, with a column for each draft behind them; each rank has the only group of Mamba's heads."""
    found = {}
    for family in DRAFTING if drafts else FAMILIES:
        for kind, columns, needed, is_shared in vllms.states(family, served):
            found.setdefault(kind, set()).add(family)
            if kind in CUT_STATES and kind != "MAMBA1":
                assert (family, columns) == (family, needed + drafts)
            config = FAMILIES[family]
            groups = config.get(
                "mamba_n_groups", config.get("n_groups", config.get("mamba_ngroups"))
            )
            if kind == "MAMBA2":
                assert (family, is_shared) == (family, groups == 1)
    assert {*found} >= ({"GDN_ATTN"} if drafts else {"MAMBA2", "GDN_ATTN"})


@pytest.mark.parametrize("family", SPARSE)
def test_packed_latents_are_planned_as_flashmla_stores_them(vllms, tmp_path, family):
    expected = vllms.of(family, "packed")
    assert planned(FAMILIES[family], tmp_path, family, cache_dtype=PACKED) == expected
    assert sorted({nbytes for *_, nbytes in expected} - {132}) == [656]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_transformers_saved_again_is_planned_alike(vllms, tmp_path, family):
    saved = vllms.saved(family)
    if saved is None:
        pytest.skip("transformers has no class of this type")
    assert isinstance(saved, dict), saved
    assert planned(saved, tmp_path, family) == planned(FAMILIES[family], tmp_path, family)


@pytest.mark.parametrize("family", [*FAMILIES, *ENCODED])
def test_building_a_model_leaves_its_position_encoding_as_it_is_stated(vllms, family):
    """Code of models writes into the configuration; a stage of a pipeline may run none that does."""
    before, after = vllms.encodings(family)
    assert before == after


def test_the_defaults_are_those_of_transformers():
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.model_defaults"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
