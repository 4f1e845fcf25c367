"""Engines with kvconnector under launchers other than `vllm serve`; docs/launchers.md explains them."""
