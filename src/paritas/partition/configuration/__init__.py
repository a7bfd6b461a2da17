"""An operator and its arguments, as a configuration names them."""
