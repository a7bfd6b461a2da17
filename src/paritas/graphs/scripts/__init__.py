"""For each failure, a script that shows it with torch alone."""
