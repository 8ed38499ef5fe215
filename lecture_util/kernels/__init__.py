"""Triton kernels, each beside its torch reference. Importing this loads no Triton.

selective_scan         the scan's definition, its reference, and the choice between them
selective_scan_triton  the kernel: a state that stays on the chip
"""
