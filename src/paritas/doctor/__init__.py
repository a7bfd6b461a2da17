"""Whether this machine, this torch and paritas fit together: what `paritas doctor` checks."""
