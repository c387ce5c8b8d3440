"""Where KV lives. Host part (no torch): allocator, manager. Device part: page_table, pool."""
