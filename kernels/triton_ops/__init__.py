"""Triton kernels and their launchers, one module per op. Imported only where a CUDA tensor asks for one, so `kernels` needs no triton."""
