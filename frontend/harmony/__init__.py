"""The Harmony chat format of gpt-oss: rendering conversations and parsing replies, with no engine and no HTTP."""
