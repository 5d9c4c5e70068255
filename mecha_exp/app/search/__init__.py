"""`sweep=search`: asks Optuna for the next trials of a sweep, a pass at a time."""
