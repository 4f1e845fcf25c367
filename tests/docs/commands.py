"""Checks of the commands that the documentation names, and of their options."""

import json
import re
import tomllib
from types import SimpleNamespace

import click

from kvconnector.cli.app import app
from kvconnector.config import SECTIONS, ConnectorConfig
from kvconnector.integrations.vllm.settings import ROLES, Settings
from minillm.demo import parse_arguments
from minillm.server import parse_config
from scripts.benchmarks.__main__ import app as benchmarks
from tests.docs.blocks import ROOT

ALWAYS_THERE = [
    "cat",
    "curl",
    "pre-commit",
    "promtool",
    "serve",
    "setup_check",
    "source",
    "ss",
    "tee",
    "vllm-router",
]
MODULES_OF_OTHERS = {
    "dynamo.sglang",
    "dynamo.vllm",
    "json.tool",
    "venv",
    "sglang.launch_server",
    "vllm_router.app",
}


def check(command):
    """Fail for a command, an option or a file that does not exist (any more)."""
    name, *arguments = command
    if name == "torchrun":  # the program that it starts, as Python would
        name, arguments = "python", arguments[arguments.index("-m") :]
    if name.startswith("scripts/"):
        _check_script(name, arguments)
    elif name not in ALWAYS_THERE:
        assert name in CHECKS, f"{name}: how is this command checked?"
        CHECKS[name](arguments)


def check_cli(arguments, *, is_whole=True, program=app):
    """Check a `kvconnector` command with its own parser."""
    command, rest = program, [a for a in arguments if a != "--help"]
    is_whole &= len(rest) == len(arguments)  # `--help` needs no other arguments
    context = command.make_context("kvconnector", list(rest), resilient_parsing=True)
    while rest and isinstance(command, click.Group) and not rest[0].startswith("-"):
        _, command, rest = command.resolve_command(context, list(rest))
    if is_whole or rest:
        command.make_context("kvconnector", list(rest))


def check_settings(variables):
    """Check that environment variables are settings of ours."""
    control = {} if any("KEY_FILE" in name for name in variables) else {"insecure": True}
    ConnectorConfig.from_env(variables, {"engine_id": "e", "control": control})


def check_json(text):
    """Check that a text is JSON, and valid if it is a configuration of ours or of vLLM's."""
    found = json.loads(text)
    if "kv_connector" in found:
        _check_transfer_config(found)
    elif found.keys() <= SECTIONS.keys():
        control = {"insecure": True} | found.get("control", {})
        ConnectorConfig.from_mapping({"engine_id": "e", **found, "control": control})


def _check_transfer_config(found):
    assert found["kv_role"] in ROLES
    assert found.get("kv_connector_module_path", "") in ("", "kvconnector.integrations.vllm")
    if found["kv_connector"] == "MultiConnector":
        *others, ours = found["kv_connector_extra_config"]["connectors"]
        assert [each["kv_connector"] for each in others] == ["OffloadingConnector"]
        _check_transfer_config(ours)
        return
    assert found["kv_connector"] in ("KVConnector", "NixlConnector")
    transfer = SimpleNamespace(**{"kv_connector_extra_config": {}, "engine_id": "e"} | found)
    model, parallel = SimpleNamespace(model="m"), SimpleNamespace(data_parallel_index=0)
    vllm_config = SimpleNamespace(
        kv_transfer_config=transfer, model_config=model, parallel_config=parallel
    )
    Settings.of(vllm_config, {})


def _check_vllm(arguments):
    encoder = "--ec-transfer-config"
    if "--kv-transfer-config" in arguments or encoder not in arguments:
        check_json(_value_of("--kv-transfer-config", arguments))
    if encoder in arguments:
        found = json.loads(_value_of(encoder, arguments))
        module = found["ec_connector_module_path"]
        source = "".join(
            path.read_text() for path in (ROOT / module.replace(".", "/")).glob("*.py")
        )
        assert f"class {found['ec_connector']}(" in source
        assert f'"{found["ec_role"]}": ' in source


def _value_of(option, arguments):
    return arguments[arguments.index(option) + 1]


def _check_python(arguments):
    if arguments[0] != "-m":
        _check_options(arguments[0], arguments[1:])
        return
    module, rest = arguments[1], list(arguments[2:])
    if module in MODULES_OF_OTHERS:
        if "--kv-transfer-config" in rest:
            check_json(_value_of("--kv-transfer-config", rest))
    elif module == "kvconnector":
        check_cli(rest)
    elif module in ("minillm.prefill_server", "minillm.decode_server"):
        parse_config("prefill" if "prefill" in module else "decode", rest)
    else:
        _check_options(f"examples/{module.replace('.', '/')}.py", rest)


def _check_script(name, arguments):
    if name == "scripts/demo":
        parse_arguments(list(arguments))
    elif name == "scripts/hosts":
        _check_options("tests/hosts/network.py", arguments)
    elif name == "scripts/bench":
        check_cli(arguments, program=benchmarks)
    elif name == "scripts/mutants":
        _check_options("scripts/mutants.py", arguments)
    elif name == "scripts/test":
        missing = [
            path for path in arguments if path.startswith("tests/") and not (ROOT / path).exists()
        ]
        assert not missing
    else:
        _check_options(name, arguments)


def _check_options(path, arguments):
    """Check that each option is named in the source of the program, or of the package that it starts."""
    source = (ROOT / path).read_text(encoding="utf-8")
    for package in re.findall(r"-m (tests[\w.]+)", source):
        files = (ROOT / package.replace(".", "/")).glob("*.py")
        source += "".join(file.read_text(encoding="utf-8") for file in files)
    if path == "examples/minillm/router.py":
        source += (ROOT / "examples/minillm/http_serving.py").read_text(encoding="utf-8")
    options = [each for each in arguments if re.fullmatch(r"--[\w-]+", each)]
    missing = [each for each in options if not re.search(rf"{re.escape(each)}\b", source)]
    assert not missing, f"{path} has no {missing}"


def _check_pip(arguments):
    assert arguments[0] == "install"
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"].keys()
    for named in re.findall(r"(?:kvconnector|\.)\[(.*?)\]", " ".join(arguments)):
        assert set(named.split(",")) <= extras


CHECKS = {
    "kvconnector": check_cli,
    "pip": _check_pip,
    "python": _check_python,
    "python3": _check_python,
    ".venv-vllm/bin/python": _check_python,
    "vllm": _check_vllm,
}
