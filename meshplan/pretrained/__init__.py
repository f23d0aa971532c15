"""Weights in the format of the model hub: safetensors folders read and written by parallelised models."""
