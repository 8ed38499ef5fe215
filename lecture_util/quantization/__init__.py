"""Fewer bits a weight: formats, scales, and the layers that compute with them.

formats       floating-point formats bit by bit, equal to torch's
scales        absmax and zero-point, by tensor, row, column and group
ste           quantization-aware training, straight through the rounding
layer         what every quantized layer has in common
linear        quantized layers swapped into a model, ours and bitsandbytes'
borrowed      bitsandbytes' layers, behind the interface of ours
llm_int8      int8 with outlier columns apart
nf4           4 bits by quantiles of a normal, scales quantized too
group_linear  any number of bits by groups, as a layer
int4          4-bit groups, packed, through the kernel
awq           scales chosen by what activations make important, folded into the layer before
awq_search    the search for those scales, and for where to clip
salient       the experiment that led to them: keep some channels in full
errors        how wrong each layer has become
"""
