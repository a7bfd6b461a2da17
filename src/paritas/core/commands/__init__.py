"""What the commands of all questions share: options, progress, running a script, ranks."""
