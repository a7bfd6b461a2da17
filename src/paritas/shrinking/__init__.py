"""The smallest program that still shows a failure, and the script that proves it."""
