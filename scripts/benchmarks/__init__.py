"""Benchmarks for developers of kvconnector: `scripts/bench` runs them, and no wheel has them."""
