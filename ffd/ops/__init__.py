"""The engine's operations, one file each or a tight family."""
