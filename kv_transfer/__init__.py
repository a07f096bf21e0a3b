"""How KV gets from a prefill rank into a decode rank's pool, and who may write where until when."""
