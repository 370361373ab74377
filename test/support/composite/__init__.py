"""A tiny composite model: encoder, autoregressive loop with an inner loop, flow loop, streamed codec."""
