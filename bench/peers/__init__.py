"""The same requests to the same weights in several systems, each in a process of its own; and in our codecs."""
