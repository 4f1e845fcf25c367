"""The direct path: a consumer on the producer's host reads its pools itself, under the eyes of a lease board."""
