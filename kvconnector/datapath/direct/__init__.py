"""The direct path: a consumer on the producer's host reads its pools itself, checked against its lease board."""
