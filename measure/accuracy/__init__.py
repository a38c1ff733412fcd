"""The cost of a form of the KV cache in accuracy: `hackkv eval`, or `python -m measure.accuracy`.

Every number comes out of the serving path: `ModelRunner`, the codec's packed pages and the kernels, with the prompt
prefilled in chunks and the answer decoded token by token. Rejected: quantizing and dequantizing K and V inside a plain
model ("fake quantization"). It measures neither the 8-bit Q and P, nor the open page, nor the bytes.

variants (rows) x suite (columns) -> run (jobs) -> results (scores with intervals) -> report, plot
"""
