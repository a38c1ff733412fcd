"""POST /v1/responses: OpenAI's newer API, stateless, over the core of /v1/chat/completions."""
