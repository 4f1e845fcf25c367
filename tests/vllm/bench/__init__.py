"""First tokens of two vLLM engines, as `vllm serve` runs them, with kvconnector and with NixlConnector in turns."""
