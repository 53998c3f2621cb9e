"""Recurrences of one row: matrix states, convolutions and linear scans; nothing of caches or layers."""
