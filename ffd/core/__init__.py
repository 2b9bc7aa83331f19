"""The pure part: no I/O, no database, no event loop."""
