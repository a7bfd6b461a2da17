"""Results made into what people and programs read. No number is computed here."""
