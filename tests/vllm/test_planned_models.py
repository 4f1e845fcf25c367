"""What `kvconnector plan` reads from a `config.json` is what vLLM's own layers cache, layer by layer.

vLLM builds each model of `tests/support/model_configs.py` without weights, in a process of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import vllm

from kvconnector.cli.model_config import read_model_config
from tests.support.model_configs import FAMILIES

pytestmark = [pytest.mark.vllm, pytest.mark.integration, pytest.mark.timeout(280)]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def specs_of_vllm():
    """What vLLM's layers cache, for each family."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.layer_specs"],
        input=json.dumps(FAMILIES),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def planned(config, folder):
    """Return what each layer caches as `layer_specs` says it."""
    path = folder / "config.json"
    # without a GPU vLLM keeps recurrent states in float32, whatever the configuration says
    path.write_text(json.dumps({**config, "mamba_ssm_dtype": "float32"}))
    per_layer = 2 if config["model_type"] == "longcat_flash" else 1
    return sorted(
        [
            layer // per_layer,
            group.keeps,
            group.extent_tokens,
            sum(heads * size * item for _, heads, size, item in group.parts),
        ]
        for group in read_model_config(path).layer_groups
        for layer in group.layers
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_a_model_is_what_vllm_s_layers_cache(specs_of_vllm, tmp_path, family):
    if family == "qwen3-next" and vllm.__version__.startswith("0.31"):
        pytest.skip("vLLM 0.31 makes every fourth layer one of attention, whatever the interval")
    found = specs_of_vllm[family]
    if family == "falcon h1":  # vLLM counts the states of its layers on from the last attention
        found = sorted([layer % 6, *more] for layer, *more in found)
    assert planned(FAMILIES[family], tmp_path) == found
