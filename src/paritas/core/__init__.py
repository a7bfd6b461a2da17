"""What every question stands on. It knows no question."""
