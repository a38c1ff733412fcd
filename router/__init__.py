"""The public face: HTTP in, tokens out; places each request on a prefill and a decode node."""
