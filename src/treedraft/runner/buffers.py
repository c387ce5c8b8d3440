"""Where lasting buffers come from; see kv.buffers."""

from treedraft.kv.buffers import ALL_BACKENDS, KINDS, BufferRecord, Buffers, Kind, Source

__all__ = ["ALL_BACKENDS", "KINDS", "BufferRecord", "Buffers", "Kind", "Source"]
