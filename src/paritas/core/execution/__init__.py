"""Running programs: isolation, observation, and the further runs that show their noise."""
