"""Fewer bits a weight: formats, scales, and the layers that compute with them.

formats   floating-point formats bit by bit, equal to torch's
scales    absmax and zero-point, by tensor, row, column and group
ste       quantization-aware training, straight through the rounding
llm_int8  int8 with outlier columns apart
nf4       4 bits by quantiles of a normal, scales quantized too
awq       scales searched by what activations make important
int4      4-bit groups, packed, as a layer
linear    quantized layers, ours and bitsandbytes', swapped into a model
errors    how wrong each layer has become
"""
