"""Experts in Triton: sorting and moving rows, grouped matmuls, and dispatch through peers' memory. Its modules need Triton."""
