from __future__ import annotations

from kvconnector.integrations.vllm.tracking import Reports, Siblings


def test_a_report_repeats_until_it_is_forgotten():
    reports = Reports(capacity=2)
    reports.add(["a", "b"])
    assert reports.repeated({"a", "c"}) == {"a"}
    reports.add(["a", "c"])
    assert reports.repeated({"a", "b", "c"}) == {"a", "c"}


def test_the_first_of_its_kind_reads_and_the_others_wait_for_it():
    siblings = Siblings()
    assert siblings.add("a", "p", "x")
    assert not siblings.add("b", "p", "x")
    assert siblings.add("c", "q", "x")
    assert [siblings.first_of(request) for request in "abc"] == [None, "a", None]


def test_after_the_first_is_over_the_next_one_reads():
    siblings = Siblings()
    siblings.add("a", "p", "x")
    siblings.add("b", "p", "x")
    siblings.remove("a")
    siblings.remove("unknown")
    assert siblings.add("c", "p", "x")
    siblings.remove("b")
    assert siblings.first_of("b") is None
    assert not siblings.add("d", "p", "x")
