"""Kernels behind the semantic operators, imported as `meshplan.kernels`: attention blocks, ring and merge, experts."""
