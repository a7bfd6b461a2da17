"""Match two dumps, compare what belongs together, find where they begin to differ."""
