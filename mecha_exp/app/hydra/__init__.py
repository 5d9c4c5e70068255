"""Everything that touches Hydra's insides: composing configurations, launching and sweeping jobs."""
