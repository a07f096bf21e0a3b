"""A prefill group: one request at a time, in chunks, its KV pushed to a decode group layer by layer."""
