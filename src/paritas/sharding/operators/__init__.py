"""Is an operator the same when it is split over ranks?."""
