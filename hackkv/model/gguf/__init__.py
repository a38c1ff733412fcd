"""GGUF files as checkpoints: each is converted once into a folder that every process of the machine maps.

`header` reads what a file says about itself and believes none of it, `configuration` and `vocabulary` turn the metadata
into a Hugging Face folder, `tensors` turns blocks into numbers, `cache` keeps the result.
"""
