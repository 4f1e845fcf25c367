"""Faults in single pipeline stages of a decode engine."""

import os

VARIABLE = "KVC_FAILING_STAGES"
IN_STAGES = {VARIABLE: "91,92"}
"""Makes each stage fail prompts of one length in tokens, once it has read them: the first stage those of 91."""


def fail_in_stages():
    """Hook the engine that will run in this process, if its environment has `IN_STAGES`."""
    from kvconnector.errors import LocalError
    from kvconnector.integrations.sglang.transfers import LoadedPrompt

    if VARIABLE not in os.environ:
        return
    lengths = [int(each) for each in os.environ[VARIABLE].split(",")]
    take = LoadedPrompt._take_metadata

    def take_or_fail(prompt):
        take(prompt)
        if prompt.num_tokens == lengths[prompt.kv_mgr.rank.pp_rank]:
            raise LocalError("a fault of the test")

    LoadedPrompt._take_metadata = take_or_fail
