"""The nodes: who is alive, how loaded, who gets room, and who waits for it."""
