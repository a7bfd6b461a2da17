"""verify() and guard(): model against model, compiled graph against graph; where it starts."""
