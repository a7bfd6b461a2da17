"""Ways of running one model that must agree: relations, and `invariants()`, which checks them."""
