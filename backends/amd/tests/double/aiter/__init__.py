"""A double of aiter 0.1.20: its signatures, and in torch what its kernels do."""
