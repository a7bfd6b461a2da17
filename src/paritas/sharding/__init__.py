"""Is it the same when it is split over ranks? Operators, graphs, plans, and proofs."""
