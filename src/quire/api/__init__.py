"""Other names and signatures for attention: PyTorch's, flash-attention's, and our own."""
