"""Attention without a cache, for encoders: packed items see their own segment."""

from mstar.kernels.segment_attention import attend_all, segment_attend

__all__ = ["attend_all", "segment_attend"]
