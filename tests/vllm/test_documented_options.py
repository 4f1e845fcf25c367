"""The documentation's options for `vllm serve`, checked by vLLM's own parser."""

import shlex
from itertools import pairwise

import pytest

from tests.docs.blocks import blocks, recorded

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def parser():
    # where vLLM 0.32 has it
    arguments = pytest.importorskip("vllm.entrypoints.launchers.cli_args")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return arguments.make_arg_parser(FlexibleArgumentParser())


@pytest.mark.parametrize(
    "block", [b for b in blocks("sh") if "vllm serve" in b.text or "-args" in b.text], ids=str
)
def test_vllm_takes_the_options_in_the_documentation(block, parser, tmp_path):
    for name, *arguments in recorded(block, tmp_path)[0]:
        if name == "vllm":
            parser.parse_args(arguments[1:])
        for option, value in pairwise(arguments):
            if option in {"--prefill-args", "--decode-args"}:
                parser.parse_args(["MODEL", *shlex.split(value)])
