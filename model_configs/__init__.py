"""The built-in model configs, one YAML file each. Its schema is in mecha_exp/architectures/schema.py."""
