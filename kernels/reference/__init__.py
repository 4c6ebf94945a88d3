"""The definition of every op: plain torch, float32 accumulation, one rounding at the end. Slow, obvious."""
