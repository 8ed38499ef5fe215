"""Triton kernels, each beside its torch reference. Importing this loads no Triton.

int4_linear            weights of 4 bits: their packing, the product's reference, the choice
int4_linear_triton     the kernel: weights that become numbers in registers only
paged_attention        keys in pages: the definition, an index for a step, the choice
paged_attention_triton the kernel: pages read where they lie, split over the context
selective_scan         the scan's definition, its reference, and the choice between them
selective_scan_triton  the kernel: a state that stays on the chip
interpreted            is a kernel compiled, or interpreted on the CPU?
"""
