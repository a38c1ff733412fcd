"""What codecs may know of a model: `hackkv calibrate`, or `python -m measure.calibrate`.

text (windows of tokens) -> moments (one pass of the model, exact attention) -> solve (bases and gains for `rot-*`) or
project (rotations for `zack`) -> a safetensors file, which the codecs read (`hackkv.codecs.rotated`, `.zack`).
"""
