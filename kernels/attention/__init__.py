"""Attention blocks in Triton, and the ring that reads peers' memory. `block` needs Triton installed; this file does not."""
