"""Programs in float64 and with their rounding drawn at random: where measured noise comes from."""
