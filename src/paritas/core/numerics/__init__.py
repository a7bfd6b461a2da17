"""Pure functions on tensors: the criterion, judge, metrics, statistics, sketches, bits."""
