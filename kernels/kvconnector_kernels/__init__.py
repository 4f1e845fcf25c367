"""Copy and table kernels that know nothing of the connector: each has a naive oracle, a CPU and a GPU version."""
