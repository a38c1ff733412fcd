"""What codecs may know of a model: `hackkv calibrate`, or `python -m measure.calibrate`.

text (windows of tokens) -> one pass of the model, exact attention -> a safetensors file, which the codecs read. For
`rot-*` (`hackkv.codecs.rotated`) the pass gathers moments, of which `solve` makes bases and gains; for `kvquant-*`
(`.kvquant`) it sees ranges and levels; for `zack` (`.zack`) `project` makes rotations of moments.
"""
