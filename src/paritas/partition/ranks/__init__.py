"""Real ranks: processes that talk by gloo, and threads that think they are ranks."""
