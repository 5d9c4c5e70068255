"""What mecha_exp brings along to be tried at once."""
