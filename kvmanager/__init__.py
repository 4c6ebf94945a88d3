"""The KV-block manager: one daemon that owns the block pool, the reference counts and the prefix index."""
