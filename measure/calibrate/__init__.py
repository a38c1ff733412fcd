"""What the codecs `rot-*` may know of a model: `hackkv calibrate`, or `python -m measure.calibrate`.

text (windows of tokens) -> moments (one pass of the model, exact attention) -> solve (bases, gains) -> a safetensors
file, which the codecs read (`hackkv.codecs.rotated`).
"""
