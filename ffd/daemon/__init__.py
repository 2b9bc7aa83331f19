"""The long-running process that keeps every promise while nobody is looking. Read `supervisor` first."""
