"""The double of vLLM: its MiniMax-M3 operators as functions of torch, with the signatures of version 0.33.0."""
