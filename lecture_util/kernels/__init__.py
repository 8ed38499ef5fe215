"""Triton kernels, one a file, each beside its reference in torch. Importing this loads no Triton."""
