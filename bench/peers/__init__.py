"""The same requests to the same weights in several systems, each as a process of its own; and in our codecs."""
