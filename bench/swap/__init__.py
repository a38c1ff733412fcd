"""A decode node with a tenth of the memory that its load wants, beside one with all of it."""
