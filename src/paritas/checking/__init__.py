"""verify(): model against model; isolation, observation and evidence."""
