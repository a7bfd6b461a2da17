"""A whole model under a parallel plan, against the same model on one device."""
