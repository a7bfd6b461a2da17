"""Many targets under many settings, each in its own process."""
