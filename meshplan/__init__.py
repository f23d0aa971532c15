"""meshplan: a sharding-plan compiler for PyTorch. The public surface; everything else may change."""
