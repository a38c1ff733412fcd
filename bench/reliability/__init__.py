"""What a cluster of real processes does when its nodes are killed or restarted under load."""
