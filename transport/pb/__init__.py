"""Generated from kv.proto by `make proto`; only transport imports it."""
