"""OpenAI-compatible HTTP and the Harmony chat format, in front of a router; imports `common` only."""
