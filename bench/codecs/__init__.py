"""docs/codecs.md by one command: what every codec holds, sends, loses and takes, on SmolLM2."""
