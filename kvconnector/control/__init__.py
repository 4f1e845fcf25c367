"""The control channel: small messages between workers, over ZMQ or in memory."""
