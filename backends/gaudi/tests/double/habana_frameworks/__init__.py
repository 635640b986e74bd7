"""A double of the Python side of Habana's torch bridge: its signatures, and its documented semantics in torch."""
