"""Launchers that read SGLang's command line without loading its plugins accept our backend's name."""

import json
import os
import subprocess
import sys

import pytest

from tests.sglang.harness.launchers import OURS, declare_entry_points

pytestmark = pytest.mark.sglang

GROUP = "sglang.srt.platforms"
DYNAMO = os.environ.get("KVC_DYNAMO", "")
"""A folder with Dynamo's wheels: see scripts/test_sglang --launchers."""
LAUNCHER = """
import argparse
import sys
from sglang.srt.server_args import ServerArgs

parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
options = ["--model-path", "m", "--disaggregation-transfer-backend", "kvconnector"]
print(parser.parse_args(options).disaggregation_transfer_backend)
"""
SPLIT = """
import sys, torch
torch.cuda.get_device_capability = lambda *_: (9, 0)
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import prepare_server_args

options = ["--model-path", sys.argv[1], "--disaggregation-mode", "prefill", "--device", "cpu"]
options += ["--disaggregation-transfer-backend", sys.argv[2], "--skip-tokenizer-init"]
options += ["--tp", "2", "--attn-cp-size", "2", "--enable-prefill-cp", "--cp-strategy", "interleave"]
made = prepare_server_args([*options, "--enable-dsa-cache-layer-split"])
made.resolve_once()
found = resolving_view(made)
print(found.disaggregation_transfer_backend, found.enable_dsa_cache_layer_split, found.page_size)
"""
OF_GLM = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "num_hidden_layers": 4,
    "index_topk": 64,
    "index_head_dim": 128,
    "index_n_heads": 4,
}
OF_DYNAMO = """
import asyncio, sys
from dynamo.sglang.args import parse_args

options = ["--model-path", sys.argv[1], "--disaggregation-mode", "prefill", "--device", "cpu"]
options += ["--disaggregation-transfer-backend", "kvconnector", "--skip-tokenizer-init"]
options += ["--disaggregation-bootstrap-port", "8998", "--attention-backend", "torch_native"]
found = asyncio.run(parse_args([*options, "--discovery-backend", "file"]))
print(found.server_args.disaggregation_transfer_backend)
"""


@pytest.fixture
def run(tmp_path):
    """A function that runs Python code, or a module, in a process in which our distribution has these entry points."""
    if os.environ.get("SGLANG_SOURCES"):
        pytest.skip("needs SGLang itself")

    def run(*arguments, groups=(), path=""):
        declare_entry_points(tmp_path, groups)
        folders = [str(tmp_path), path, os.environ.get("PYTHONPATH", "")]
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "SGLANG_USE_CPU_ENGINE": "1",
            "SGLANG_PLUGINS": OURS,  # not those of the installed distribution
        }
        return subprocess.run(
            [sys.executable, *arguments],
            env=environ,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )

    return run


def test_a_launcher_without_plugins_accepts_the_name_by_the_platforms_entry_point(run):
    refused = run("-c", LAUNCHER)
    assert refused.returncode != 0
    assert "invalid choice: 'kvconnector'" in refused.stderr
    accepted = run("-c", LAUNCHER, groups=[GROUP])
    assert accepted.stdout.split()[-1:] == ["kvconnector"], accepted.stderr[-2000:]


def test_sglang_admits_a_cache_split_by_layers_in_a_launcher_without_plugins(run, tmp_path):
    """With all of SGLang's own resolution of a sparse model's options, as on a GPU."""
    (tmp_path / "config.json").write_text(json.dumps(OF_GLM), "utf-8")
    refused = run("-c", SPLIT, str(tmp_path), "nixl", groups=[GROUP])
    assert "only supports the mooncake transfer backend" in refused.stderr
    admitted = run("-c", SPLIT, str(tmp_path), "kvconnector", groups=[GROUP])
    assert admitted.stdout.split()[-3:] == ["kvconnector", "True", "64"], admitted.stderr[-2000:]


def test_a_launcher_that_our_module_runs_accepts_the_name(run, tmp_path):
    (tmp_path / "launcher.py").write_text(LAUNCHER + "print(__name__, sys.argv)\n", "utf-8")
    found = run(
        *("-m", "kvconnector.integrations.sglang", "launcher", "--an-option"),
        groups=["sglang.srt.plugins"],
    )
    assert "kvconnector\n__main__" in found.stdout, found.stderr[-2000:]
    assert "'--an-option']" in found.stdout
    assert "usage" in run("-m", "kvconnector.integrations.sglang").stderr


def test_the_platform_stays_the_one_that_sglang_finds(run):
    code = "from sglang.srt.platforms import current_platform as p; print(p.device_name)"
    plain, ours = run("-c", code), run("-c", code, groups=[GROUP])
    assert plain.returncode == ours.returncode == 0, ours.stderr[-2000:]
    assert plain.stdout == ours.stdout


@pytest.mark.skipif(not DYNAMO, reason="needs Dynamo: scripts/test_sglang --launchers")
def test_dynamos_worker_accepts_the_name(run, tmp_path):
    from tests.sglang.harness.model import model_of

    model = model_of(tmp_path)
    found = run("-c", OF_DYNAMO, str(model), groups=[GROUP], path=DYNAMO)
    assert found.stdout.split()[-1:] == ["kvconnector"], found.stderr[-3000:]
    refused = run("-c", OF_DYNAMO, str(model), path=DYNAMO)
    assert "invalid choice: 'kvconnector'" in refused.stderr
