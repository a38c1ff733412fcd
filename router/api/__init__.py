"""The HTTP API and the page: requests checked and tokenized, answers written as OpenAI does."""
