"""The bench of whole engines, without engines: its options, the order of what it asks, and its tables."""

from collections import defaultdict
from types import SimpleNamespace

import pytest

from tests.vllm.bench.__main__ import _case, _plan, parse
from tests.vllm.bench.measure import SLEEPS, WARM_UP, Contender, Plan, Turns
from tests.vllm.bench.report import Report, cases_of, save
from tests.vllm.harness.report import OURS

MODE = "enable_sleep_mode"
GPU = ["--device", "cuda", "--folder", "x", "--model", "llama-8b-caches"]
FOUR = ["kvconnector", "packed", "sleep", "sleep-packed"]
TITLES = {
    "kvconnector": "direct",
    "kvconnector, sleep mode": "direct",
    "kvconnector, sleep mode, packed": "packed",
}
PLAN = Plan(
    lengths=[16], step_tokens=16, repetitions=2, burst_requests=2, burst_tokens=16, churn_tokens=0
)


def case(name):
    options = parse([*GPU, "--connectors", ",".join(FOUR)])
    return _case(name, _plan(options), options.device, options.model)


def test_engines_of_a_sleep_mode_pair_differ_from_the_plain_ones_in_that_alone():
    plain, packed, sleep, sleep_packed = (case(name).prefill for name in FOUR)
    for asleep, awake in ((sleep, plain), (sleep_packed, packed)):
        assert asleep == {**awake, "arguments": {**awake["arguments"], MODE: True}}
    assert [
        each["environment"].get("KVCONNECTOR_PATHS_DIRECT") for each in (sleep, sleep_packed)
    ] == [
        None,
        "never",
    ]
    assert case("sleep").decode == sleep


@pytest.mark.parametrize(
    "given,words",
    [
        (["--connectors", "kvconnector,sleep"], "only on GPUs"),
        ([*GPU, "--connectors", "sleep,asleep"], "asleep: choose of kvconnector"),
    ],
)
def test_pairs_that_there_cannot_be_are_refused(given, words, capsys):
    with pytest.raises(SystemExit) as refused:
        parse([*given, "--folder", "x"])
    assert refused.value.code == 2
    assert words in capsys.readouterr().err


class Engine:
    """Answers at once. Its loads take the path `path`; the connector reports them as vLLM's engine does."""

    def __init__(self, name, asked, path=""):
        self._name = name
        self._asked = asked
        self._path = path
        self._loads = defaultdict(list)

    def submit(self, prompt, params=None, *_, **__):
        if params:
            self._loads["transfer"].append(0.5)
            self._loads["bytes"].append(len(prompt))
            self._loads["paths"].append(self._path)
        return prompt

    def answer(self, prompt):
        return SimpleNamespace(
            tokens=[7],
            reason="length",
            params={"remote": 1},
            least_gap=1.0,
            first=2.0,
            second=3.0,
            first_token_s=1.0,
        )

    def forget(self, **_):
        pass

    def call(self, command):
        self._asked.append((self._name, command))
        loads, self._loads = self._loads, defaultdict(list)
        return loads


class Pair:
    """Two such engines, as `tests.vllm.harness.pair.Pair`."""

    def __init__(self, name, asked, path):
        self.prefill, self.decode = Engine(f"{name}'s P", asked), Engine(f"{name}'s D", asked, path)

    def wait_until_ready(self):
        pass

    def begin_prefill(self, prompt):
        return prompt

    def offered(self, prompt):
        return self.prefill.answer(prompt)


def run():
    """Returns the turns after a run, and what was called on the engines."""
    asked = []
    pairs = {
        OURS: Contender(Pair(OURS, asked, "direct"), 2),
        "sleep": Contender(Pair("sleep", asked, "direct"), 2, can_sleep=True),
        "sleep-packed": Contender(Pair("sleep-packed", asked, "packed"), 2, can_sleep=True),
    }
    turns = Turns(pairs, PLAN, lambda _: None, lambda _: None)
    turns.run()
    return turns, asked


def test_each_engine_in_sleep_mode_sleeps_before_each_of_the_last_requests():
    _, asked = run()
    sleeping = {"sleep's P", "sleep's D", "sleep-packed's P", "sleep-packed's D"}
    slept = [index for index, (_, command) in enumerate(asked) if command == "sleep"]
    assert len(slept) == SLEEPS * len(sleeping)
    while slept:
        turn, slept = slept[:4], slept[4:]
        assert {asked[index][0] for index in turn} == sleeping
        # one request of each pair follows
        after = asked[turn[-1] + 1 : slept[0] if slept else None]
        assert sorted(after) == [
            (f"{name}'s D", "stats") for name in (OURS, "sleep", "sleep-packed")
        ]


def test_contenders_begin_in_turns():
    _, asked = run()
    first = [name for name, command in asked if command == "stats"][::3]
    # after the first contact
    assert first[: WARM_UP + PLAN.repetitions] == ["sleep-packed's D", "kvconnector's D"] * 2


def test_the_tables_say_by_which_path_loads_came_and_count_no_other_cases_loads(tmp_path):
    turns, _ = run()
    report = Report(command="c", environment={}, plan={}, cases=tuple(cases_of(turns)))
    _, common, burst, after = report.cases
    for found, count in ((common, PLAN.repetitions), (after, SLEEPS)):
        rows = {each.contender: each for each in found.measurements}
        for title, path in TITLES.items():
            row = rows[f"{title}: transfer"]
            assert row.figures[f"{path} loads"] == len(row.samples_s) == count
            assert [name for name in row.figures if "loads" in name] == [f"{path} loads"]
    assert not any(each.nbytes for each in burst.measurements)
    text = save(tmp_path, report)
    assert all(f"{title}: transfer" in text for title in TITLES)
