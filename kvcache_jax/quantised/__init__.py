"""The layer kind `Quantised`, and the formats in which it stores numbers, a file each."""
