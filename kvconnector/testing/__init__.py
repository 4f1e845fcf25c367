"""Conformance suites, strategies and faulty worlds: for our tests, and for those of other implementations."""
