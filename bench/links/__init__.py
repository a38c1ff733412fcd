"""What `bench.jct` is made of: links of several speeds, a cluster behind one of them, and the page on them all."""
