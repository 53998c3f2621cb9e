"""Other projects' cache managers, timed on the same machine in the same run.

Each module is run alone, with one argument, the sizes as JSON, and prints one JSON object on its last line:
`{"peer": ..., "records": [...]}`, or `{"peer": ..., "skipped": reason}`. Of ours it imports `timing` alone, so
that it also runs under an interpreter in which only the peer is installed (`--peers-python`).
"""
