"""What the integration uses of vLLM is there: `scripts/test_vllm --contracts` asks each known release."""

import importlib

import pytest
import vllm

from kvconnector.errors import ConfigError
from kvconnector.integrations.contract import Sources, differences, release_of
from kvconnector.integrations.vllm import SUPPORTED_VLLM, check_version, outputs, used

pytestmark = pytest.mark.vllm


def test_this_release_is_known_and_has_all_that_is_used(monkeypatch):
    assert release_of(vllm.__version__)[:2] in SUPPORTED_VLLM
    monkeypatch.setenv("KVCONNECTOR_ENGINE_VERSIONS", "known")
    check_version(vllm.__version__)
    assert differences(used.ENTRIES + used.RANGES, Sources.of("vllm")) == []


def test_an_encoder_s_outputs_move_since_0_32():
    found = differences(used.ENCODER, Sources.of("vllm"))
    if release_of(vllm.__version__)[:2] >= (0, 32):
        assert found == []
    else:
        assert found
        with pytest.raises(ConfigError, match=r"0\.32"):
            assert importlib.import_module("kvconnector.integrations.vllm.encoder").EncoderConnector


def test_the_sources_are_known_that_decide_what_is_added_to_outputs():
    found = {each.__qualname__: outputs.source_digest(each) for each in outputs._USED}
    known = {each.__qualname__: digests for each, digests in outputs._USED.items()}
    assert {name for name, digest in found.items() if digest not in known[name]} == set()
