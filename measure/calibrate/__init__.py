"""Facts about a model that codecs may use: `hackkv calibrate`, or `python -m measure.calibrate`.

text (windows of tokens) -> one pass of the model, exact attention -> a safetensors file, which the codecs read. For
`rot-*` (`hackkv.codecs.rotated`) the pass gathers moments, and `solve` makes bases and gains of them. For `kvquant-*`
(`.kvquant`) the pass finds ranges and levels. For `zack` (`.zack`) `project` makes rotations of moments.
"""
