"""Shared by the tests: conformance suites, strategies, in-process links with faults, whole worlds of sessions."""
