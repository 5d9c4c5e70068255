"""Output for people: progress bars, plans, tables, errors; and JSON for programs."""
