"""A double of FlashInfer 0.7.4: its signatures, and its documented semantics in torch."""
