"""Many targets under many settings, each in a process of its own."""
