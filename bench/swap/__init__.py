"""A decode node with a tenth of the memory that its load needs, beside one with all of it."""
