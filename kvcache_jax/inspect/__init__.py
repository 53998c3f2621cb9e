"""Views of a cache on the host: invariants, block maps, reasons for a miss."""
