"""A decode group: continuous batching over KV that prefill groups wrote."""
