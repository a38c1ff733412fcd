"""POST /v1/messages: Anthropic's API over the core of /v1/chat/completions."""
