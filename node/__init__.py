"""The code that processes of every role share: they start, announce that they are ready, drain and end."""
