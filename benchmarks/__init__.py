"""What the engine costs, measured side by side with what PostgreSQL and asyncpg could do without it.

Run `make bench`, or `python -m benchmarks NAME… [--quick] [--json FILE]`. Speed depends on the machine and on who
else uses it, so nothing here is judged by an absolute number: whatever is compared runs in turns within one run,
a ratio is taken per round, and the median of the rounds is held against its bound.
"""
