"""gpt-oss: reading and sharding its checkpoint, the forward pass, KV tensors, token sampling."""
