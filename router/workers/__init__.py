"""Several processes that serve one HTTP port, and the leader that starts them and knows the nodes."""
