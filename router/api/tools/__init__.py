"""Tools in conversations: what clients send, what models are told, and how their calls are read."""
