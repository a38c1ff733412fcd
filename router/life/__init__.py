"""One request from its arrival to its last token: its states, its legs, and what happens when a node is lost."""
