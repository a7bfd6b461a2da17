"""The check of a recipe on real ranks: processes, or threads of this process."""
