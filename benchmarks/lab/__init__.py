"""What the measurements share: figures and their files, clocks, memory, the page made of all."""
