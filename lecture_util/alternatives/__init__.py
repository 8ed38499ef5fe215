"""Beyond attention: layers whose memory does not grow, and text that is not written left to right.

state             one state a layer, replaced at every step
s4                a linear state: a recurrence to generate, a convolution to train
selective         the selective scan in chunks, and the quick choice
mamba             selective state, short convolution and gate in one block
linear_attention  a sum in place of a cache: parallel, chunked and recurrent
based             a short window and a linear state in turn
layouts           hybrids as data, and their memory at any context
recall_models     four memories trained on one recall task
diffusion         masked diffusion: hide tokens, learn to fill them in
denoise           from masks to text, in as many passes as you like
small_models      a diffusion model of bytes and its autoregressive twin, trained and shipped
"""
