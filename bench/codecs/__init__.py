"""docs/codecs.md by one command: the bytes, the loss and the times of every codec on SmolLM2."""
